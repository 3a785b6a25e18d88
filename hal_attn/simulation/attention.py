"""The numbers of a simulated kernel: attention with every score kept, in float32, differentiable by PyTorch itself.

A vendor's simulated functions call it with their own conventions spelled out (which corner a triangle hangs from, what
a mask's True means) and give its result in the vendor's layout. It shares nothing with the code that is judged by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Attended:
    """Output `[B, Sq, H, Dv]` in the dtype of query, LSE `[B, H, Sq]` float32, and `empty`, bool like the LSE: rows in
    which no key is visible; their output is 0 and their LSE -inf, or the sink. Packed: `[Tq, H, Dv]`, `[H, Tq]`."""

    output: Tensor
    lse: Tensor
    empty: Tensor

    def lse_with(self, empty_lse: float | None) -> Tensor:
        """The LSE with what the vendor writes for rows without keys; None leaves -inf."""
        return self.lse if empty_lse is None else self.lse.masked_fill(self.empty, empty_lse)


@dataclass(frozen=True)
class Band:
    """Keys from `left` before to `right` after the diagonal, both inclusive, -1 or None unlimited; the diagonal ends in
    the bottom right corner, or starts in the top left one."""

    left: int | None = -1
    right: int | None = -1
    top_left: bool = False

    def visible(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Bool `[Sq, Sk]`."""
        shift = 0 if self.top_left else seqlen_k - seqlen_q
        ahead = torch.arange(seqlen_k)[None] - torch.arange(seqlen_q)[:, None] - shift
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        if self.right is not None and self.right != -1:
            visible &= ahead <= self.right
        if self.left is not None and self.left != -1:
            visible &= ahead >= -self.left
        return visible


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Attended:
    """Query `[B, Sq, H, D]`, key `[B, Sk, Hkv, D]`, value `[B, Sk, Hkv, Dv]`; `visible` and `bias` broadcast to
    `[B, H, Sq, Sk]`, slopes `[H]` or `[B, H]` are ALiBi's along the bottom-right diagonal, sinks `[H]`."""
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[2] // key.shape[2]
    q, k, v = (tensor.to(compute).transpose(1, 2) for tensor in (query, key, value))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(compute)
    if slopes is not None:
        place = torch.arange(scores.shape[-2])[:, None] + scores.shape[-1] - scores.shape[-2]
        distance = (place - torch.arange(scores.shape[-1])).abs().to(compute)
        scores = scores - slopes.to(compute).expand(q.shape[:2])[..., None, None] * distance
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(compute)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[-1])], 2)
    empty = torch.isneginf(scores).all(-1)
    scores = scores.masked_fill(empty.unsqueeze(-1), 0.0)
    weights = scores.softmax(-1).masked_fill(empty.unsqueeze(-1), 0.0)
    if dropout_p:
        weights = weights * (torch.rand_like(weights) >= dropout_p) / (1 - dropout_p)
    lse = scores.logsumexp(-1).masked_fill(empty, -torch.inf)
    return Attended((weights @ v).transpose(1, 2).to(query.dtype), lse.float(), empty)


def spoiled_by_scale(attended: Attended, scale: float) -> Attended:
    """NaN where the scale is not above 0: what kernels give that hide keys with -inf, and look for the largest score,
    before they scale (FlashAttention 2 to 4, Composable Kernel; cuDNN 9.19 as seen on an H200)."""
    if scale > 0:
        return attended
    return replace(attended, output=attended.output * torch.nan, lse=torch.full_like(attended.lse, torch.nan))


def check_loads(*tensors: Tensor, first: int = 0, multiple: int = 8) -> None:
    """Kernels that load 16 bytes at a time want the first element on 16 bytes and the strides of the dimensions from
    `first` to the last but one as multiples of `multiple` elements; else a misaligned address, or an error before."""
    for tensor in tensors:
        strides = zip(tensor.shape[first:-1], tensor.stride()[first:-1], strict=True)
        whole = all(stride % multiple == 0 for size, stride in strides if size > 1)
        if not whole or tensor.storage_offset() * tensor.element_size() % 16:
            raise RuntimeError(f"misaligned address: strides {tensor.stride()}, offset {tensor.storage_offset()}")


def check_grid(query: Tensor, cu_seqlens: Tensor | None = None) -> None:
    """The launch of a kernel that counts sequences and heads in dimensions of its grid of 65,535."""
    sequences = query.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if max(sequences, query.shape[-2]) > 65_535:
        raise RuntimeError("CUDA error: invalid argument")


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Sequence[int],
    offsets_k: Sequence[int],
    *,
    band: Band,
    slopes: Tensor | None = None,
    **options: float | Tensor | None,
) -> Attended:
    """`attend` for each sequence of a packed batch: query `[Tq, H, D]`, key and value `[Tk, Hkv, D]`, offsets with a
    leading 0; slopes `[H]` or `[N, H]`."""
    parts = []
    pairs = zip(itertools.pairwise(offsets), itertools.pairwise(offsets_k), strict=True)
    for index, ((begin, end), (begin_k, end_k)) in enumerate(pairs):
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[index]
        rows = (query[begin:end], key[begin_k:end_k], value[begin_k:end_k])
        visible = band.visible(end - begin, end_k - begin_k)
        parts.append(attend(*(part[None] for part in rows), visible=visible, slopes=own, **options))  # type: ignore[arg-type]
    return Attended(
        torch.cat([part.output[0] for part in parts]),
        torch.cat([part.lse[0] for part in parts], 1),
        torch.cat([part.empty[0] for part in parts], 1),
    )


def partial_gradients_packed(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    offsets: Sequence[int],
    offsets_k: Sequence[int],
    *,
    band: Band,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in their dtype, as a kernel's backward pass computes them from the output and
    the LSE `[H, Tq]` that it is given, whichever keys these came from; +inf there makes every weight of a row 0."""
    grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    pairs = zip(itertools.pairwise(offsets), itertools.pairwise(offsets_k), strict=True)
    for (begin, end), (begin_k, end_k) in pairs:
        q, out, upstream = (t[begin:end].float().transpose(0, 1) for t in (query, output, grad_output))
        k, v = (t[begin_k:end_k].float().transpose(0, 1).repeat_interleave(group, 0) for t in (key, value))
        hidden = ~band.visible(end - begin, end_k - begin_k)
        weights = torch.exp(q @ k.transpose(1, 2) * scale - lse[:, begin:end, None]).masked_fill(hidden, 0.0)
        delta = (upstream * out).sum(-1, keepdim=True)
        scores = weights * (upstream @ v.transpose(1, 2) - delta)
        found = (scores @ k * scale, scores.transpose(1, 2) @ q * scale, weights.transpose(1, 2) @ upstream)
        grads[0][begin:end] = found[0].transpose(0, 1)
        for grad, part in zip(grads[1:], found[1:], strict=True):
            grad[begin_k:end_k] = part.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)
