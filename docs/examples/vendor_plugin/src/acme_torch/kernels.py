"""Acme's attention kernels, in Acme's conventions. Plain PyTorch, as a stand-in for device code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Sequence[int],
    ends_k: Sequence[int],
    factor: float = 1.0,
    triangle: bool = False,
) -> tuple[Tensor, Tensor]:
    """float32 `[T, H, D]` -> output `[T, H, D]`, LSE `[T, H]` in base 2. The triangle hangs from the top left."""
    if query.dtype != torch.float32 or query.shape[1:] != key.shape[1:] or key.shape != value.shape:
        raise RuntimeError("packed_attention: float32, one shape of heads for query, key and value")
    outputs, lses, begin, begin_k = [], [], 0, 0
    for end, end_k in zip(ends, ends_k, strict=True):
        q, k, v = query[begin:end], key[begin_k:end_k], value[begin_k:end_k]
        scores = q.transpose(0, 1) @ k.permute(1, 2, 0) * factor
        if triangle:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        outputs.append((scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1))
        lses.append(_base_2(scores).T)
        begin, begin_k = end, end_k
    return torch.cat(outputs), torch.cat(lses)


@torch.no_grad()
def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    factor: float = 1.0,
    before: int | None = None,
    after: int | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """float16 `[B, S, H, D]` -> output, LSE `[B, S, H]` in base 2. The band is aligned bottom right; None is no edge.

    Rows without keys are not spoken of; here they are NaN.
    """
    if query.dtype != torch.float16 or query.shape[3] % 16 or query.shape[2] != key.shape[2]:
        raise RuntimeError("fused_attention: float16, head dims in steps of 16, as many key heads as query heads")
    q, k, v = (tensor.float().transpose(1, 2) for tensor in (query, key, value))
    scores = q @ k.transpose(2, 3) * factor
    place = torch.arange(query.shape[1], device=query.device)[:, None] + key.shape[1] - query.shape[1]
    ahead = torch.arange(key.shape[1], device=query.device)[None] - place
    if before is not None:
        scores = scores.masked_fill(ahead < -before, -torch.inf)
    if after is not None:
        scores = scores.masked_fill(ahead > after, -torch.inf)
    output = (scores.softmax(-1) @ v).transpose(1, 2).to(query.dtype)
    return output, _base_2(scores).transpose(1, 2) if with_lse else None


def _base_2(scores: Tensor) -> Tensor:
    return (scores.double().logsumexp(-1) / math.log(2)).float()
