"""PyTorch's own flash and memory-efficient attention on the CPU, under the signatures, conventions and limits of their
CUDA kernels (schemas of PyTorch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from hal_attn.simulation.attention import Attended, Band, attend, attend_packed
from hal_attn.simulation.flash_attn import check_offsets

FlashResult = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
EfficientResult = tuple[Tensor, Tensor, Tensor, Tensor, int, int]
LSE_ROWS = 32
ALIGNMENT = 8


def simulated_aten(empty_lse: float | None = None) -> SimpleNamespace:
    """The operators as `torch.ops.aten` has them; a row without keys gives LSE +inf by flash and 0.0 by the
    memory-efficient kernel, or `empty_lse` by both."""
    flash_empty, efficient_empty = (float("inf"), 0.0) if empty_lse is None else (empty_lse, empty_lse)
    return SimpleNamespace(
        _flash_attention_forward=_flash_attention_forward(flash_empty),
        _efficient_attention_forward=_efficient_attention_forward(efficient_empty),
    )


def _flash_attention_forward(empty_lse: float) -> Callable[..., FlashResult]:
    def _flash_attention_forward(
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
        _check_flash(query, key, value, alibi_slopes)
        band = Band(window_size_left, 0 if is_causal else window_size_right)
        scale = query.shape[-1] ** -0.5 if scale is None else scale

        def attended(slopes: Tensor | None) -> Attended:
            if cum_seq_q is None or cum_seq_k is None:
                visible = band.visible(query.shape[1], key.shape[1])
                return attend(query, key, value, visible=visible, scale=scale, slopes=slopes, dropout_p=dropout_p)
            check_offsets(cum_seq_q, max_q)
            check_offsets(cum_seq_k, max_k)
            offsets = (cum_seq_q.tolist(), cum_seq_k.tolist())
            return attend_packed(
                query, key, value, *offsets, band=band, scale=scale, slopes=slopes, dropout_p=dropout_p
            )

        result = attended(alibi_slopes)
        output = result.output
        if alibi_slopes is not None:
            # The backward pass knows no slopes, so its gradient is that of the call without them.
            bare = attended(None).output
            output = bare + (output - bare).detach()
        state = torch.zeros(2, dtype=torch.uint64)
        nothing = torch.empty(0, dtype=query.dtype)
        return output, result.lse_with(empty_lse).detach(), state, torch.zeros((), dtype=torch.uint64), nothing

    return _flash_attention_forward


def _efficient_attention_forward(empty_lse: float) -> Callable[..., EfficientResult]:
    def _efficient_attention_forward(
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
        if any(tensor.requires_grad for tensor in (query, key, value)) and torch.is_grad_enabled():
            _must(compute_log_sumexp, "the backward pass reads a logsumexp that was not computed")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        options: dict[str, float | Tensor | None] = {"scale": scale, "dropout_p": dropout_p}

        def attended(window: int | None) -> Attended:
            left = None if window is None else window - 1
            if cu_seqlens_q is None or cu_seqlens_k is None:
                visible = _triangle(custom_mask_type, left, query.shape[1], key.shape[1])
                return attend(query, key, value, visible=visible, bias=bias, **options)  # type: ignore[arg-type]
            _must(bias is None, "cu seqlen + bias not supported")
            _must(query.shape[0] == 1, "cu_seqlen only supports batch_size=1")
            _must(max_seqlen_q is not None and max_seqlen_k is not None, "max_seqlen required with cu_seqlens")
            check_offsets(cu_seqlens_q, max_seqlen_q or 0)
            check_offsets(cu_seqlens_k, max_seqlen_k or 0)
            rows = (query[0], key[0], value[0])
            offsets = (cu_seqlens_q.tolist(), cu_seqlens_k.tolist())
            top_left = custom_mask_type == 1
            band = Band(left, 0 if custom_mask_type else None, top_left)
            return attend_packed(*rows, *offsets, band=band, **options)

        result = attended(window_size)
        output = result.output
        if window_size is not None:
            # The backward pass is not told of the window.
            full = attended(None).output
            output = full + (output - full).detach()
        longest = query.shape[1] if max_seqlen_q is None else max_seqlen_q
        lse = result.lse_with(empty_lse).detach()
        if cu_seqlens_q is not None:
            output = output.unsqueeze(0)
            lse = _rows_of(lse, cu_seqlens_q.tolist(), longest)
        lse = _padded(lse, -(-longest // LSE_ROWS) * LSE_ROWS) if compute_log_sumexp else lse[..., :0]
        state = torch.zeros((), dtype=torch.long)
        longest_k = key.shape[1] if max_seqlen_k is None else max_seqlen_k
        return output, lse, state, state, longest, longest_k

    return _efficient_attention_forward


def _triangle(custom_mask_type: int, left: int | None, seqlen_q: int, seqlen_k: int) -> Tensor:
    band = Band(left, 0 if custom_mask_type else None, top_left=custom_mask_type == 1)
    if custom_mask_type == 2 and seqlen_q > seqlen_k:
        # The diagonal is an unsigned number in the kernel: below zero, nothing is beyond it.
        band = Band(left)
    return band.visible(seqlen_q, seqlen_k)


def _rows_of(lse: Tensor, offsets: list[int], longest: int) -> Tensor:
    """`[H, Tq]` -> `[N, H, longest]`, padded with +inf, as the kernel leaves rows that are not there."""
    parts = lse.split([end - begin for begin, end in zip(offsets, offsets[1:], strict=False)], 1)
    return torch.stack([_padded(part, longest) for part in parts])


def _padded(lse: Tensor, rows: int) -> Tensor:
    return F.pad(lse, (0, rows - lse.shape[-1]), value=float("inf"))


def _check_flash(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None) -> None:
    _must(query.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    _must(query.dtype == key.dtype == value.dtype, "query and key must have the same dtype")
    contiguous = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    _must(contiguous, "Input tensor must have contiguous last dimension")
    dim = query.shape[-1]
    _must(dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    _must(dim % 8 == 0, "query must have head_size divisible by 8")
    _must(value.shape[-1] == dim, "value must have the head dimension of query")
    _must(query.shape[-2] % key.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
    _must(slopes is None or slopes.dtype == torch.float32, "ALiBi slopes must have dtype fp32")


def _check_efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: tuple[int, int | None]
) -> None:
    _must(query.dtype in (torch.float32, torch.float16, torch.bfloat16), "Only fp32, half & bf16 supported")
    _must(query.dim() == key.dim() == value.dim() == 4, "query.dim() == 4")
    _must(query.shape[2] == key.shape[2] == value.shape[2], "query, key and value must have the same heads")
    for tensor in (query, key, value):
        _must(tensor.stride(-1) == 1, "last dimension must be contiguous")
        strides = zip(tensor.shape[1:-1], tensor.stride()[1:-1], strict=True)
        aligned = all(stride % ALIGNMENT == 0 for size, stride in strides if size > 1)
        _must(aligned and tensor.shape[-1] % ALIGNMENT == 0, "query is not correctly aligned")
    if bias is not None:
        _must(bias.dtype == query.dtype, "invalid dtype for bias - should match query's dtype")
        expected = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        _must(tuple(bias.shape) == expected, "attn_bias: wrong shape")
        strides = bias.stride()
        _must(strides[3] == 1, "attn_bias: wrong alignment (last dimension must be contiguous)")
        aligned = all(
            stride % ALIGNMENT == 0 for size, stride in zip(bias.shape[:3], strides, strict=False) if size > 1
        )
        _must(aligned, "attn_bias is not correctly aligned")
    kind, window = mask
    _must(kind in (0, 1, 2), "invalid value for `custom_mask_type`")
    _must(not window or kind != 0, "custom_mask_type not supported")


def _must(holds: bool, message: str) -> None:
    """As TORCH_CHECK: a RuntimeError where a rule of the kernel is broken."""
    if not holds:
        raise RuntimeError(message)
