"""Attention by plain PyTorch operators in the dtype of the inputs: the yardstick of the precision rule, no oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hal_attn.guard import attempt
from hal_attn.packing import PackedSequences


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`[B, S, H, D]` inputs -> (output `[B, Sq, H, Dv]`, LSE `[B, H, Sq]`), everything in the dtype of `query`."""
    dtype = query.dtype
    group = query.shape[2] // key.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    seqlen_q, seqlen_k = scores.shape[-2:]
    places, keys = (torch.arange(length, device=query.device) for length in (seqlen_q, seqlen_k))
    distance = places[:, None] + seqlen_k - seqlen_q - keys
    left, right = window_size or (-1, -1)
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if left is not None and left >= 0:
        hidden |= distance > left
    if right is not None and right >= 0:
        hidden |= distance < -right
    if mask is not None:
        if mask.dtype == torch.bool:
            hidden |= ~mask
        else:
            scores = scores + mask.to(dtype)
    if key_padding_mask is not None:
        hidden |= ~key_padding_mask[:, None, None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes.expand(query.shape[0], query.shape[2])[:, :, None, None]
        scores = scores - slopes.to(dtype) * distance.abs().to(dtype)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[-1])], dim=2)
    dead = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    lse = torch.logsumexp(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead[..., 0], -torch.inf)
    return (weights @ v).transpose(1, 2), lse


def plain_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, **options: Any
) -> tuple[Tensor, Tensor]:
    """`plain_attention` one sequence at a time: output `[Tq, H, Dv]`, LSE `[H, Tq]`."""
    slopes = options.pop("alibi_slopes", None)
    rows = query.split(sequences.lengths), key.split(sequences.lengths_k), value.split(sequences.lengths_k)
    outputs, lses = [], []
    for index, (q, k, v) in enumerate(zip(*rows, strict=True)):
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[index]
        output, lse = plain_attention(q[None], k[None], v[None], alibi_slopes=own, **options)
        outputs.append(output[0])
        lses.append(lse[0])
    if not outputs:
        return query.new_zeros(0, query.shape[1], value.shape[2]), query.new_zeros(query.shape[1], 0).float()
    return torch.cat(outputs), torch.cat(lses, 1)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Within it products keep the digits of their dtype: no TF32 or bfloat16 in the place of float32, no autocast."""
    # PyTorch answers "highest" only where no switch of any age says otherwise, and refuses to answer where they differ.
    before = attempt(torch.get_float32_matmul_precision, None)[0]
    if before == "highest":
        with torch.autocast(device.type, enabled=False):
            yield
        return
    vendors: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    kept = [(vendor, vendor.fp32_precision) for vendor in vendors if hasattr(vendor, "fp32_precision")]
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for vendor, precision in kept:
            vendor.fp32_precision = precision
