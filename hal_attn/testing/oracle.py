"""The right answer to a call, by the float64 oracle, and the same by plain PyTorch in the call's own dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal_attn.packing import PackedSequences
from hal_attn.reference import reference_attention, reference_varlen_attention
from hal_attn.testing.plain import plain_attention, plain_varlen_attention
from hal_attn.testing.tensors import Tensors, randn


@dataclass(frozen=True)
class Expected:
    """The right answer to a call by the oracle and by plain PyTorch: outputs, LSEs and gradients of query, key, value
    for the loss `sum(output * weight)`."""

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
    query: Tensor, key: Tensor, value: Tensor, *, sequences: PackedSequences | None = None, **options: Any
) -> Expected:
    """Computes `Expected` for a call; `sequences` for packed tensors."""
    inputs = (query, key, value)
    extra = () if sequences is None else (sequences,)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    own = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
    oracle: Any = reference_attention if sequences is None else reference_varlen_attention
    plain: Any = plain_attention if sequences is None else plain_varlen_attention
    output, lse = oracle(*exact, *extra, **options)
    plain_output, plain_lse = plain(*own, *extra, **options)
    weight = randn(*output.shape, seed=99, dtype=query.dtype)
    return Expected(
        output.detach(),
        lse.detach(),
        _gradients(output, weight.double(), exact),
        plain_output.detach(),
        plain_lse.detach(),
        _gradients(plain_output, weight, own),
        weight,
    )


def _gradients(output: Tensor, weight: Tensor, inputs: tuple[Tensor, ...]) -> Tensors:
    if not output.requires_grad:
        found = tuple(torch.zeros_like(tensor) for tensor in inputs)
    else:
        loss = (output * weight).sum()
        found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return found  # type: ignore[return-value]
