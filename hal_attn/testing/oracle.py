"""The right answer to a call, by the float64 oracle, and the same by plain PyTorch in the call's own dtype.

The oracle is computed on the CPU, plain PyTorch on the device of the call: vendors add in other orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal_attn.packing import PackedSequences
from hal_attn.reference import reference_attention, reference_varlen_attention
from hal_attn.testing.plain import full_precision, plain_attention, plain_varlen_attention
from hal_attn.testing.tensors import Tensors, randn


@dataclass(frozen=True)
class Expected:
    """The right answer to a call by the oracle and by plain PyTorch: outputs, LSEs and gradients of query, key, value
    for the loss `sum(output * weight)`; all on the CPU."""

    output: Tensor
    lse: Tensor
    gradients: Tensors
    plain_output: Tensor
    plain_lse: Tensor
    plain_gradients: Tensors
    weight: Tensor

    @property
    def largest_gradient(self) -> float:
        """Over query, key and value."""
        return max((gradient.abs().max().item() for gradient in self.gradients if gradient.numel()), default=0.0)


def expected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sequences: PackedSequences | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Expected:
    """Computes `Expected` for a call of CPU tensors; `sequences` for packed ones.

    Args:
        device: where the call runs, and so plain PyTorch.
    """
    inputs = (query, key, value)
    extra = () if sequences is None else (sequences,)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    oracle: Any = reference_attention if sequences is None else reference_varlen_attention
    output, lse = oracle(*exact, *extra, **options)
    weight = randn(*output.shape, seed=99, dtype=query.dtype)
    plain_output, plain_lse, plain_gradients = _plainly(inputs, extra, weight, torch.device(device), options)
    return Expected(
        output.detach(),
        lse.detach(),
        _gradients(output, weight.double(), exact),
        plain_output,
        plain_lse,
        plain_gradients,
        weight,
    )


def _plainly(
    inputs: Tensors, extra: tuple[PackedSequences, ...], weight: Tensor, device: torch.device, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensors]:
    """Output, LSE and gradients by plain PyTorch on `device`, brought back to the CPU."""
    own = tuple(tensor.detach().to(device, copy=True).requires_grad_() for tensor in inputs)
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    plain: Any = plain_varlen_attention if extra else plain_attention
    with full_precision(device):
        output, lse = plain(*own, *extra, **given)
        gradients = _gradients(output, weight.to(device), own)
    return output.detach().cpu(), lse.detach().cpu(), tuple(gradient.cpu() for gradient in gradients)  # type: ignore[return-value]


def _gradients(output: Tensor, weight: Tensor, inputs: tuple[Tensor, ...]) -> Tensors:
    if not output.requires_grad:
        found = tuple(torch.zeros_like(tensor) for tensor in inputs)
    else:
        loss = (output * weight).sum()
        found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return found  # type: ignore[return-value]
