"""Seeded inputs of attention calls: the same for the same seed on every machine, in every dtype up to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal_attn.packing import PackedSequences

Tensors = tuple[Tensor, Tensor, Tensor]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
    """Normal numbers times `spread`, from a generator of their own, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(dtype)


def dense(
    batch: int = 2,
    seqlen_q: int = 5,
    seqlen_k: int | None = None,
    *,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 16,
    value_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 1.0,
) -> Tensors:
    """Query `[B, Sq, H, D]`, key `[B, Sk, Hkv, D]`, value `[B, Sk, Hkv, Dv]`; `spread` widens queries and keys."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    kv_heads = heads if kv_heads is None else kv_heads
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    return (
        randn(batch, seqlen_q, heads, head_dim, seed=3 * seed, dtype=dtype, spread=spread),
        randn(batch, seqlen_k, kv_heads, head_dim, seed=3 * seed + 1, dtype=dtype, spread=spread),
        randn(batch, seqlen_k, kv_heads, value_head_dim, seed=3 * seed + 2, dtype=dtype),
    )


def packed(
    lengths: Sequence[int], lengths_k: Sequence[int] | None = None, **shape: object
) -> tuple[Tensor, Tensor, Tensor, PackedSequences]:
    """Query `[Tq, H, D]`, key, value and their sequences; `shape` as for `dense`."""
    tokens_k = sum(lengths if lengths_k is None else lengths_k)
    query, key, value = dense(1, sum(lengths), tokens_k, **shape)  # type: ignore[arg-type]
    return query[0], key[0], value[0], PackedSequences.from_lengths(lengths, lengths_k)
