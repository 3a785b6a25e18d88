"""PyTorch's own flash and memory-efficient attention on the CPU, under the signatures, conventions and limits of their
CUDA kernels (schemas of PyTorch 2.13)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hal_attn.simulation.attention import (
    Attended,
    Band,
    attend,
    attend_packed,
    check_grid,
    check_loads,
    partial_gradients_packed,
    spoiled_by_scale,
)
from hal_attn.simulation.flash_attn import check_offsets, flash_band

FlashResult = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
EfficientResult = tuple[Tensor, Tensor, Tensor, Tensor, int, int]
LSE_ROWS = 32
ALIGNMENT = 8


def simulated_aten(empty_lse: float | None = None) -> SimulatedAten:
    """The operators as `torch.ops.aten` has them; a row without keys gives LSE +inf by flash and 0.0 by the
    memory-efficient kernel, or `empty_lse` by both."""
    return SimulatedAten() if empty_lse is None else SimulatedAten(empty_lse, empty_lse)


@dataclass(frozen=True)
class SimulatedAten:
    """The two operators, and what each writes as the LSE of rows without keys."""

    flash_empty_lse: float = math.inf
    efficient_empty_lse: float = 0.0

    def _flash_attention_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> FlashResult:
        must(seqused_k is None and block_table is None, "the simulation has no paged keys")
        must(alibi_slopes is None, "This flash attention build does not support alibi.")
        _check_flash(query, key, value)
        check_grid(query, cum_seq_q)
        band = _flash_band(is_causal, window_size_left, window_size_right, max_k)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        options = {"scale": scale, "dropout_p": dropout_p}
        if cum_seq_q is None or cum_seq_k is None:
            visible = band.visible(query.shape[1], key.shape[1])
            attended = attend(query, key, value, visible=visible, **options)  # type: ignore[arg-type]
        else:
            offsets = (host_offsets(cum_seq_q, max_q), host_offsets(cum_seq_k, max_k))
            attended = attend_packed(query, key, value, *offsets, band=band, **options)  # type: ignore[arg-type]
        attended = spoiled_by_scale(attended, scale)
        state = torch.zeros(2, dtype=torch.uint64)
        nothing = torch.empty(0, dtype=query.dtype)
        return attended.output, attended.lse_with(self.flash_empty_lse).detach(), state, state[0], nothing

    def _flash_attention_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        must(dropout_p == 0.0, "the simulation keeps no random state")
        _check_flash(query, key, value)
        offsets = (host_offsets(cum_seq_q, max_q), host_offsets(cum_seq_k, max_k))
        return partial_gradients_packed(
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            *offsets,
            band=_flash_band(is_causal, window_size_left, window_size_right, max_k),
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
        )

    def _efficient_attention_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        dropout_p: float,
        custom_mask_type: int,
        compute_log_sumexp: bool = False,
        *,
        scale: float | None = None,
        seqlen_k: Tensor | None = None,
        window_size: int | None = None,
    ) -> EfficientResult:
        _check_efficient(query, key, value, bias, (custom_mask_type, window_size))
        check_grid(query, cu_seqlens_q)
        inputs = [tensor for tensor in (query, key, value, bias) if tensor is not None]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            must(compute_log_sumexp, "the backward pass reads a logsumexp that was not computed")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        longest, longest_k = query.shape[1], key.shape[1]
        offsets: tuple[list[int], list[int]] | None = None
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            must(bias is None, "cu seqlen + bias not supported")
            must(query.shape[0] == 1, "cu_seqlen only supports batch_size=1")
            must(max_seqlen_q is not None and max_seqlen_k is not None, "max_seqlen required with cu_seqlens")
            longest, longest_k = max_seqlen_q or 0, max_seqlen_k or 0
            offsets = (host_offsets(cu_seqlens_q, longest), host_offsets(cu_seqlens_k, longest_k))

        def attended(window: int | None) -> Attended:
            options = {"scale": scale, "dropout_p": dropout_p}
            band = Band(None if window is None else window - 1, 0 if custom_mask_type else None, custom_mask_type == 1)
            if offsets is not None:
                return attend_packed(query[0], key[0], value[0], *offsets, band=band, **options)  # type: ignore[arg-type]
            visible = _visible(band, custom_mask_type, longest, longest_k)
            return attend(query, key, value, visible=visible, bias=bias, **options)  # type: ignore[arg-type]

        result = attended(window_size)
        output, lse = result.output, result.lse_with(self.efficient_empty_lse).detach()
        if window_size is not None:
            # The backward pass is not told of the window, so its gradient is that of the call without it.
            output = with_gradient_of(attended(None).output, output)
        if offsets is not None:
            output, lse = output.unsqueeze(0), _rows_of(lse, offsets[0], longest)
        lse = _padded(lse, -(-longest // LSE_ROWS) * LSE_ROWS) if compute_log_sumexp else lse[..., :0]
        state = torch.zeros((), dtype=torch.long)
        return output, lse, state, state, longest, longest_k


def host_offsets(offsets: Tensor, longest: int) -> list[int]:
    """The offsets as a list, checked as a kernel checks them, or reads beyond its memory without checking."""
    check_offsets(offsets, longest)
    values: list[int] = offsets.tolist()
    return values


def with_gradient_of(function: Tensor, values: Tensor) -> Tensor:
    """`values`, with the gradient of `function`: a kernel whose backward pass leaves out an option."""
    return function + (values - function).detach()


def _flash_band(causal: bool, left: int | None, right: int | None, longest_k: int) -> Band:
    return flash_band(causal, (-1 if left is None else left, -1 if right is None else right), longest_k)


def _visible(band: Band, custom_mask_type: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    if custom_mask_type == 2 and seqlen_q > seqlen_k:
        # The diagonal is an unsigned number in the kernel: below zero, nothing is beyond it.
        band = Band(band.left)
    return band.visible(seqlen_q, seqlen_k)


def _rows_of(lse: Tensor, offsets: list[int], longest: int) -> Tensor:
    """`[H, Tq]` -> `[N, H, longest]`, padded with +inf, as the kernel leaves rows that are not there."""
    parts = lse.split([end - begin for begin, end in itertools.pairwise(offsets)], 1)
    return torch.stack([_padded(part, longest) for part in parts])


def _padded(lse: Tensor, rows: int) -> Tensor:
    return F.pad(lse, (0, rows - lse.shape[-1]), value=float("inf"))


def _check_flash(query: Tensor, key: Tensor, value: Tensor) -> None:
    must(query.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    must(query.dtype == key.dtype == value.dtype, "query and key must have the same dtype")
    contiguous = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    must(contiguous, "Input tensor must have contiguous last dimension")
    check_loads(query, key, value)
    dim = query.shape[-1]
    must(dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    must(dim % 8 == 0, "query must have head_size divisible by 8")
    must(value.shape[-1] == dim, "value must have the head dimension of query")
    must(query.shape[-2] % key.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")


def _check_efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: tuple[int, int | None]
) -> None:
    must(query.dtype in (torch.float32, torch.float16, torch.bfloat16), "Only fp32, half & bf16 supported")
    must(query.dim() == key.dim() == value.dim() == 4, "query.dim() == 4")
    must(query.shape[2] == key.shape[2] == value.shape[2], "query, key and value must have the same heads")
    for tensor in (query, key, value):
        must(tensor.stride(-1) == 1, "last dimension must be contiguous")
        check_loads(tensor, first=1, multiple=ALIGNMENT)
        must(tensor.shape[-1] % ALIGNMENT == 0, "query is not correctly aligned")
    if bias is not None:
        must(bias.dtype == query.dtype, "invalid dtype for bias - should match query's dtype")
        expected = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        must(tuple(bias.shape) == expected, "attn_bias: wrong shape")
        must(bias.stride(3) == 1, "attn_bias: wrong alignment (last dimension must be contiguous)")
        check_loads(bias, multiple=ALIGNMENT)
    kind, window = mask
    must(kind in (0, 1, 2), "invalid value for `custom_mask_type`")
    must(not window or kind != 0, "custom_mask_type not supported")


def must(holds: bool, message: str) -> None:
    """As TORCH_CHECK: a RuntimeError where a rule of the kernel is broken."""
    if not holds:
        raise RuntimeError(message)
