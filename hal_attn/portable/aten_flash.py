"""`torch_flash`: PyTorch's own FlashAttention, batched and packed, below SDPA because that is where windows are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal_attn.capabilities import Capabilities
from hal_attn.errors import UnsupportedAttentionError
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult, PackedKernel, to_head_dim
from hal_attn.masks import edges
from hal_attn.packing import PackedSequences
from hal_attn.portable.flash_rules import longest_lengths, positive_scale_rule, window_rule
from hal_attn.portable.generation import (
    capability_rule,
    compute_capability,
    flash2_backward_rule,
    grid_rule,
    repeatable_backward_rule,
)
from hal_attn.portable.lse import packed_lse
from hal_attn.portable.operators import active_flash_impl, aligned
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

OPERATOR = "_flash_attention_forward"
BACKWARD = "_flash_attention_backward"


class TorchFlashBackend(BatchedKernel, PackedKernel):
    """aten `_flash_attention_forward`, `[B, S, H, D]` and `[T, H, D]`, as of PyTorch 2.13.

    It is the operator that `torch.nn.attention.varlen.varlen_attn` ends in. That function has no batched form and no
    dropout, and its signature changed from release to release; the operator has only grown keyword arguments.

    Its rules: float16 and bfloat16; one head dim of at most 256, padded to a multiple of 8; compute capability 8.0;
    rows that begin on 16 bytes; causal and windows aligned to the bottom right; no softcap, no mask, and no ALiBi: the
    operator has `alibi_slopes`, but PyTorch's CMakeLists.txt leaves it out of the kernel. The packed LSE is `[H, Tq]`,
    and `[N, H, longest]` before 2.6. A row without keys gives LSE +inf. The backward pass is deterministic only by a
    process-wide switch, so a call that asks for `deterministic` with gradients is refused.

    `torch.nn.attention.activate_flash_attention_impl` puts FlashAttention 3 or 4 behind the same operator: neither has
    dropout, and each runs on fewer devices. The rules follow what is active, and a call that was bound before it
    changed is checked again.
    """

    name = "torch_flash"
    head_dim_multiple = 8
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        max_head_dim=256,
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        sinks=True,
        dropout=True,
        deterministic=True,
        lse=True,
        gradients=True,
    )

    def unavailable(self) -> Refusal | None:
        if hasattr(self.library, OPERATOR):
            return None
        return Refusal("installed", f"PyTorch {torch.__version__}", f"PyTorch with aten {OPERATOR}, 2.2 or later")

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        architecture = self.architecture(request.device)
        refusals = super().refusals(request)
        refusals += capability_rule(architecture, 80, "FlashAttention 2")
        refusals += flash2_backward_rule(request, architecture) + window_rule(request) + positive_scale_rule(request)
        refusals += repeatable_backward_rule(request) + grid_rule(request)
        dim = max(request.head_dim, request.value_head_dim)
        return refusals + _swapped_rules(active_flash_impl(), architecture, request.dropout_p, dim)

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        self._check_swapped(query, call)
        options: dict[str, Any] = {"scale": call.scale, **_window(call.left, call.right)}
        offsets: tuple[Tensor | None, Tensor | None] = (None, None)
        lengths = (query.shape[1], key.shape[1])
        if call.metadata is not None:
            sequences = call.metadata.sequences
            offsets, lengths = sequences.offsets(query.device), longest_lengths(sequences, call)
        operator: Callable[..., tuple[Tensor, ...]] = getattr(self.library, OPERATOR)
        rows = (aligned(tensor, self.head_dim_multiple) for tensor in (query, key, value))
        output, lse, *_ = operator(*rows, *offsets, *lengths, call.dropout_p, call.right == 0, False, **options)
        if not call.needs_lse:
            return output, None
        if call.metadata is not None and lse.dim() == 3:
            lse = packed_lse(lse, call.metadata.sequences, query.shape[0])
        return output, lse

    def backward_varlen(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        *,
        sequences: PackedSequences,
        scale: float,
        causal: bool,
        window_size: tuple[int, int] | None,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """By aten `_flash_attention_backward`, which takes the LSE of the whole result as it takes its own."""
        if deterministic or active_flash_impl() is not None or not hasattr(self.library, BACKWARD):
            return None
        left, right = edges(causal, window_size)
        dims = query.shape[-1], value.shape[-1]
        query, key, value = self._padded(query, key, value)
        grad_output, output = (to_head_dim(tensor, value.shape[-1]) for tensor in (grad_output, output))
        rows = [aligned(tensor, self.head_dim_multiple) for tensor in (grad_output, query, key, value, output)]
        # The kernel's own mark of a row without keys is +inf: it makes every weight of the row 0.
        whole = lse.masked_fill(torch.isneginf(lse), torch.inf).contiguous()
        offsets = sequences.offsets(query.device)
        lengths = longest_lengths(sequences, KernelCall(scale=scale, left=left, right=right))
        # Without dropout nothing is read from the random state.
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        options = {"scale": scale, **_window(left, right)}
        operator: Callable[..., tuple[Tensor, Tensor, Tensor]] = getattr(self.library, BACKWARD)
        found = operator(*rows, whole, *offsets, *lengths, 0.0, right == 0, state, state[:0], **options)
        return found[0][..., : dims[0]], found[1][..., : dims[0]], found[2][..., : dims[1]]

    def _check_swapped(self, query: Tensor, call: KernelCall) -> None:
        active = active_flash_impl()
        if active is None:
            return
        refusals = _swapped_rules(active, self.architecture(query.device), call.dropout_p, query.shape[-1])
        if refusals:
            message = f"{self.name}: {active} was activated behind it since this call was bound"
            raise UnsupportedAttentionError(message, [(self.name, refusals)])


def _window(left: int, right: int) -> dict[str, int]:
    edges_given = {"window_size_left": left >= 0, "window_size_right": right > 0}
    return {name: edge for (name, given), edge in zip(edges_given.items(), (left, right), strict=True) if given}


def _swapped_rules(active: str | None, architecture: str, dropout_p: float, dim: int) -> tuple[Refusal, ...]:
    """What FlashAttention 3 and 4 behind PyTorch's operator refuse (torch/nn/attention/_fa3.py, _fa4.py of 2.13)."""
    if active is None:
        return ()
    hint = "torch.nn.attention.restore_flash_attention_impl()"
    refusals = []
    if dropout_p > 0:
        have = f"{dropout_p} while {active} is active"
        refusals.append(Refusal("dropout_p", have, "off, only PyTorch's own kernel has it", hint))
    capability = compute_capability(architecture)
    generations = {"FA3": (9,), "FA4": (9, 10)}.get(active)
    if capability is not None and generations is not None and capability // 10 not in generations:
        need = " or ".join(f"sm{generation}x" for generation in generations)
        refusals.append(Refusal("device", f"{architecture} while {active} is active", need, hint))
    if active == "FA4" and capability is not None and capability // 10 == 10 and 128 < dim != 256:
        refusals.append(Refusal("head_dim", f"{dim} while FA4 is active", "at most 128, or 256, on sm10x", hint))
    return tuple(refusals)
