"""What one hop computes: the blocks of (queries here) x (keys at hand) that a band leaves, as few calls as it can.

A rank's queries and the keys that arrive are spans of positions. Each pair of spans is a rectangle of scores; the band
(causal, window) cuts it, and what is left is again attention with a band, aligned to the corner of the rectangle:

```
            keys at hand c ......... d
queries a   x x x . . . .               the band of the sequence, j <= i + shift + right, is in the corner of the
 here   .   x x x x . . .               rectangle j <= i + (Sk - Sq of the rectangle) + right', right' = right + s,
        b   x x x x x . .               with s = b + shift - d; the left edge likewise, left' = left - s
```

Keys and queries outside are trimmed away first, so both edges come out at 0 or more, as kernels want them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hal_attn.request import canonical_band
from hal_attn.sequence_parallel.spans import Span


class Segment(NamedTuple):
    """A span of positions, and the row of the rank's tensor where it begins."""

    span: Span
    row: int


Runs = tuple[tuple[int, int], ...]  # (first row, rows) of each run


class Block(NamedTuple):
    """Runs of query and key rows that attend by the band (`left`, `right`), -1 unlimited, aligned bottom right."""

    queries: Runs
    keys: Runs
    left: int
    right: int


@dataclass(frozen=True)
class Band:
    """The band of one sequence: query `i` sees keys `i + shift - left` to `i + shift + right`; -1 is unlimited."""

    shift: int
    left: int
    right: int

    def first_key(self, query: int) -> int:
        return 0 if self.left < 0 else query + self.shift - self.left

    def end_of_keys(self, query: int, keys: int) -> int:
        return keys if self.right < 0 else min(keys, query + self.shift + self.right + 1)


def blocks(queries: Sequence[Segment], keys: Sequence[Segment], band: Band) -> list[Block]:
    """The blocks of one sequence at one hop; none where no query sees a key."""
    queries, keys = (sorted(s for s in side if s.span.length) for side in (queries, keys))
    if not queries or not keys:
        return []
    whole = Block(_runs(queries), _runs(keys), -1, -1)
    if band.left < 0 and band.right < 0:
        return [whole]
    if band.left < 0 and _is_triangle(queries, keys, band):
        return [_canonical(whole._replace(right=0))]
    parts = [block for q in queries for k in keys if (block := _rectangle(q, k, band))]
    return _coalesced(parts)


def _rectangle(query: Segment, key: Segment, band: Band) -> Block | None:
    """One pair of segments, trimmed to the queries and keys that meet; None where none do."""
    a, b = query.span
    c, d = key.span
    if band.right >= 0:
        a = max(a, c - band.shift - band.right)
    if band.left >= 0:
        b = min(b, d - band.shift + band.left)
    if a >= b:
        return None
    c, d = max(c, band.first_key(a)), band.end_of_keys(b - 1, d)
    if c >= d:
        return None
    corner = b + band.shift - d
    left = -1 if band.left < 0 else band.left - corner
    right = -1 if band.right < 0 else band.right + corner
    rows = ((query.row + a - query.span.start, b - a),)
    rows_k = ((key.row + c - key.span.start, d - c),)
    return _canonical(Block(rows, rows_k, left, right))


def _canonical(block: Block) -> Block:
    """An edge that hides nothing becomes -1, so that blocks with the same work share a call."""
    queries, keys = (sum(count for _, count in runs) for runs in (block.queries, block.keys))
    left, right = without_idle_edges(block.left, block.right, queries, keys)
    return block._replace(left=left, right=right)


def without_idle_edges(left: int, right: int, queries: int, keys: int) -> tuple[int, int]:
    """A band with -1 for an edge that hides nothing where there are so many queries and keys at most."""
    causal, window = canonical_band(False, (left, right), queries, keys)
    return window or (-1, 0 if causal else -1)


def _is_triangle(queries: Sequence[Segment], keys: Sequence[Segment], band: Band) -> bool:
    """Whether the segments, laid end to end, are one bottom-right triangle, as a zigzag rank's own keys are.

    Row `n` must see `n + Sk - Sq + 1` keys. Both counts are straight lines between few corners, so the corners tell.
    """
    total_q, total_k = sum(q.span.length for q in queries), sum(k.span.length for k in keys)
    passed = 0
    for query in queries:
        a, b = query.span
        corners = {a, b - 1, a - passed - total_k + total_q - 1, a - passed + total_q - 1}
        corners |= {edge - band.shift - band.right - 1 for key in keys for edge in key.span}
        for corner in {corner + step for corner in corners for step in (-1, 0, 1)}:
            if a <= corner < b:
                place = passed + corner - a
                seen = sum(_clamp(corner + band.shift + band.right + 1 - k.span.start, k.span.length) for k in keys)
                if seen != _clamp(place + total_k - total_q + 1, total_k):
                    return False
        passed += b - a
    return True


def _clamp(count: int, most: int) -> int:
    return max(0, min(count, most))


def _coalesced(parts: Iterable[Block]) -> list[Block]:
    """Blocks without an edge joined: those of the same queries over their keys, then those of the same keys."""
    edged: list[Block] = []
    by_queries: dict[Runs, Runs] = {}
    for block in parts:
        if block.left >= 0 or block.right >= 0:
            edged.append(block)
        else:
            by_queries[block.queries] = by_queries.get(block.queries, ()) + block.keys
    by_keys: dict[Runs, Runs] = {}
    for rows, rows_k in by_queries.items():
        by_keys[rows_k] = by_keys.get(rows_k, ()) + rows
    return [Block(rows, rows_k, -1, -1) for rows_k, rows in by_keys.items()] + edged


def _runs(segments: Sequence[Segment]) -> Runs:
    """The rows of segments; those that follow one another as one run."""
    runs: list[tuple[int, int]] = []
    for span, row in segments:
        if runs and sum(runs[-1]) == row:
            runs[-1] = (runs[-1][0], runs[-1][1] + span.length)
        else:
            runs.append((row, span.length))
    return tuple(runs)
