"""The float64 oracle: attention spelled out rule by rule (docs/semantics.md), one head at a time, without any kernel.

It is slow and keeps every score, on purpose: nothing here is shared with the code it judges.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hal_attn.packing import PackedSequences


def reference_attention(
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
    """Batched attention in float64: `[B, Sq, H, D]`, `[B, Sk, Hkv, D]`, `[B, Sk, Hkv, Dv]` -> (`[B, Sq, H, Dv]`, LSE
    `[B, H, Sq]`). Differentiable in every tensor. Keys that a query may not see do not reach it, NaN included."""
    batch, seqlen_q, heads, head_dim = query.shape
    seqlen_k, kv_heads = key.shape[1:3]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    outputs, lses = [], []
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            q, k, v = query[b, :, h].double(), key[b, :, g].double(), value[b, :, g].double()
            visible = _visible(seqlen_q, seqlen_k, causal, window_size).to(query.device)
            bias = torch.zeros(seqlen_q, seqlen_k, dtype=torch.float64, device=query.device)
            if mask is not None:
                part = mask.expand(batch, heads, seqlen_q, seqlen_k)[b, h]
                if part.dtype == torch.bool:
                    visible = visible & part
                else:
                    visible = visible & ~torch.isneginf(part)
                    bias = bias + part.double()
            if key_padding_mask is not None:
                visible = visible & key_padding_mask[b]
            if alibi_slopes is not None:
                slope = (alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b])[h].double()
                bias = bias - slope * _distance(seqlen_q, seqlen_k).to(query.device)
            sink = None if sinks is None else sinks[h].double()
            output, lse = _one_head(q, k, v, scale, visible, bias, softcap, sink)
            outputs.append(output)
            lses.append(lse)
    if not outputs:
        return (
            query.new_zeros(batch, seqlen_q, heads, value.shape[-1], dtype=torch.float64),
            query.new_zeros(batch, heads, seqlen_q, dtype=torch.float64),
        )
    output = torch.stack(outputs).unflatten(0, (batch, heads)).transpose(1, 2)
    return output, torch.stack(lses).unflatten(0, (batch, heads))


def reference_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Packed attention in float64, one sequence at a time: `[Tq, H, D]`, `[Tk, Hkv, D]`, `[Tk, Hkv, Dv]` ->
    (`[Tq, H, Dv]`, LSE `[H, Tq]`)."""
    outputs, lses = [], []
    rows_q, rows_k = query.split(list(sequences.lengths)), key.split(list(sequences.lengths_k))
    rows_v = value.split(list(sequences.lengths_k))
    for index, (q, k, v) in enumerate(zip(rows_q, rows_k, rows_v, strict=True)):
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[index]
        output, lse = reference_attention(
            q[None],
            k[None],
            v[None],
            scale=scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=slopes,
        )
        outputs.append(output[0])
        lses.append(lse[0])
    if not outputs:
        empty = query.new_zeros(0, query.shape[1], value.shape[-1], dtype=torch.float64)
        return empty, query.new_zeros(query.shape[1], 0, dtype=torch.float64)
    return torch.cat(outputs), torch.cat(lses, dim=1)


def _diagonal(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Each query's place among the keys, `i + Sk - Sq` as a column, and the keys' places as a row."""
    return torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q), torch.arange(seqlen_k)[None, :]


def _distance(seqlen_q: int, seqlen_k: int) -> Tensor:
    place, j = _diagonal(seqlen_q, seqlen_k)
    return (place - j).abs().double()


def _visible(seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int | None, int | None] | None) -> Tensor:
    place, j = _diagonal(seqlen_q, seqlen_k)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        visible &= j <= place
    left, right = window_size or (None, None)
    if left is not None and left >= 0:
        visible &= j >= place - left
    if right is not None and right >= 0:
        visible &= j <= place + right
    return visible


def _one_head(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor, bias: Tensor, softcap: float, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One head: q `[Sq, D]`, k `[Sk, D]`, v `[Sk, Dv]` -> (`[Sq, Dv]`, `[Sq]`)."""
    used = visible.any(0)
    k, v = k.masked_fill(~used[:, None], 0.0), v.masked_fill(~used[:, None], 0.0)
    scores = scale * (q @ k.T)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias.masked_fill(~visible, 0.0)).masked_fill(~visible, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.expand(scores.shape[0], 1)], dim=1)
        v = torch.cat([v, v.new_zeros(1, v.shape[1])])
    alive = visible.any(1)
    if sink is not None:
        alive = alive | ~torch.isneginf(sink)
    safe = scores.masked_fill(~alive[:, None], 0.0)
    weights = torch.softmax(safe, dim=1) if safe.shape[1] else safe
    weights = weights.masked_fill(~alive[:, None], 0.0)
    lse = torch.logsumexp(safe, dim=1) if safe.shape[1] else safe.sum(1)
    output = weights @ v
    if torch.isnan(v).any():
        output = _products_of_visible(weights, v, visible if sink is None else torch.nn.functional.pad(visible, (0, 1)))
    return output, lse.masked_fill(~alive, -torch.inf)


def _products_of_visible(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """`weights @ v` where a hidden key adds nothing even when its value is NaN (0 * NaN would)."""
    return torch.where(visible[:, :, None], weights[:, :, None] * v[None], 0.0).sum(1)
