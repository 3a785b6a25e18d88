"""FlashAttention 2's functions on the CPU, under the signatures, conventions and limits of flash-attn 2.8.3."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from hal_attn.simulation.attention import (
    Attended,
    Band,
    attend,
    attend_packed,
    check_grid,
    check_loads,
    spoiled_by_scale,
)

Result = Tensor | tuple[Tensor, Tensor, Tensor | None]


def simulated_flash_attn(empty_lse: float | None = None) -> SimpleNamespace:
    """The package's attention functions; a row without keys gives LSE +inf, or `empty_lse`."""
    default = float("inf") if empty_lse is None else empty_lse
    return SimpleNamespace(
        flash_attn_func=_flash_attn_func(default), flash_attn_varlen_func=_flash_attn_varlen_func(default)
    )


def _flash_attn_func(empty_lse: float) -> Callable[..., Result]:
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Result:
        _check(q, k, v, softcap, dropout_p, alibi_slopes)
        check_grid(q)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        attended = attend(
            q,
            k,
            v,
            visible=flash_band(causal, window_size, k.shape[1]).visible(q.shape[1], k.shape[1]),
            scale=scale,
            softcap=softcap,
            slopes=alibi_slopes,
            dropout_p=dropout_p,
        )
        return _returned(spoiled_by_scale(attended, scale), empty_lse, return_attn_probs)

    return flash_attn_func


def _flash_attn_varlen_func(empty_lse: float) -> Callable[..., Result]:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Result:
        _check(q, k, v, softcap, dropout_p, alibi_slopes)
        check_grid(q, cu_seqlens_q)
        check_offsets(cu_seqlens_q, max_seqlen_q)
        check_offsets(cu_seqlens_k, max_seqlen_k)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if block_table is not None:
            raise NotImplementedError("the simulation has no paged keys")
        attended = attend_packed(
            q,
            k,
            v,
            cu_seqlens_q.tolist(),
            cu_seqlens_k.tolist(),
            band=flash_band(causal, window_size, max_seqlen_k),
            scale=scale,
            softcap=softcap,
            slopes=alibi_slopes,
            dropout_p=dropout_p,
        )
        return _returned(spoiled_by_scale(attended, scale), empty_lse, return_attn_probs)

    return flash_attn_varlen_func


def check_offsets(offsets: Tensor, longest: int) -> None:
    """What every FlashAttention checks, or reads beyond its memory without checking."""
    if offsets.dtype != torch.int32:
        raise RuntimeError("cu_seqlens must have dtype int32")
    if not offsets.is_contiguous():
        raise RuntimeError("cu_seqlens must be contiguous")
    if not isinstance(longest, int):
        raise TypeError(f"max_seqlen must be an int, not {type(longest).__name__}")
    if int(offsets.diff().max()) > longest:
        raise RuntimeError(f"max_seqlen {longest} is shorter than a sequence: rows would stay unwritten")


def flash_band(causal: bool, window_size: tuple[int, int], longest_k: int) -> Band:
    """The band that the host code makes of a window, by the longest key length that it is told."""
    left, right = (-1 if edge >= longest_k else edge for edge in window_size)
    right = 0 if causal else right
    if left < 0 <= right:
        left = longest_k
    elif right < 0 <= left:
        right = longest_k
    return Band(left, right)


def _returned(attended: Attended, empty_lse: float, return_attn_probs: bool) -> Result:
    if not return_attn_probs:
        return attended.output
    # The backward pass of 2.8 takes no gradient of the LSE and drops one without a word.
    return attended.output, attended.lse_with(empty_lse).detach(), None


def _check(q: Tensor, k: Tensor, v: Tensor, softcap: float, dropout_p: float, slopes: Tensor | None) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("query and key must have the same dtype")
    if any(tensor.stride(-1) != 1 for tensor in (q, k, v)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    # Heads of another size are padded, so copied, by the package; others are read where they lie.
    if q.shape[-1] % 8 == 0:
        check_loads(q, k, v)
    if q.shape[-1] > 256 or q.shape[-1] != v.shape[-1]:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if q.shape[-2] % k.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    if softcap > 0 and dropout_p > 0:
        raise RuntimeError("Softcapping does not support dropout for now")
    if slopes is not None and slopes.dtype != torch.float32:
        raise RuntimeError("ALiBi slopes must have dtype fp32")
