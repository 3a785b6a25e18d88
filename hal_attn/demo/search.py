"""Which sentences are nearest to a query."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Match:
    """A sentence's index, and the cosine similarity of its embedding with the query's."""

    index: int
    score: float


def nearest(query: Tensor, embeddings: Tensor, count: int) -> tuple[Match, ...]:
    """The `count` best matches (or as many as there are) of a unit vector `[hidden]` in unit vectors `[N, hidden]`."""
    scores, indices = (embeddings @ query).topk(min(count, embeddings.shape[0]))
    return tuple(Match(index, score) for index, score in zip(indices.tolist(), scores.tolist(), strict=True))
