"""Spans: the runs of one sequence's tokens that a rank holds, and which rank holds which.

```
contiguous, 3 ranks, 7 tokens       zigzag, 2 ranks, 8 tokens in 4 chunks
token  0 1 2 3 4 5 6                token  0 1 2 3 4 5 6 7     causal work: rank 0 has the lightest chunk and the
rank   0 0 0 1 1 2 2                rank   0 0 1 1 1 1 0 0     heaviest, rank 1 the two between
```
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Tokens `start` to `stop` of a sequence, `stop` not among them."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


Spans = tuple[Span, ...]


def cut(first: int, last: int, parts: int, turn: int = 0) -> list[Span]:
    """Tokens `first` to `last` in `parts` spans, whose lengths differ by one at most.

    `turn` moves the longer spans on, so that a batch of short sequences does not load the same ranks each time.
    """
    count, offset = last - first, (parts - 1 - turn) % parts
    edges = [first + (index * count + offset) // parts for index in range(parts + 1)]
    edges[0], edges[-1] = first, last
    return [Span(start, stop) for start, stop in itertools.pairwise(edges)]


def deal(first: int, last: int, ranks: int, turn: int, zigzag: bool) -> list[Spans]:
    """By rank, the spans of tokens `first` to `last` that it holds; the empty ones left out."""
    if not zigzag:
        return [_kept([span]) for span in cut(first, last, ranks, turn)]
    chunks = cut(first, last, 2 * ranks, turn)
    return [_joined([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)]


def give(first: int, last: int, ranks: int, owner: int) -> list[Spans]:
    """As `deal`, with all of them on one rank."""
    return [_kept([Span(first, last)]) if rank == owner else () for rank in range(ranks)]


def nest(length: int, shares: Sequence[tuple[int, float]]) -> list[Spans] | None:
    """`length` causal tokens for ranks that have a share each, of (tokens, twice the pairs of query and key), all of
    which make the whole; None where it cannot be. As in a zigzag each rank takes from both ends of what is left:

    ```
    token  0 1 2 3 4 5 6 7 8 9      the more of a share lies at the end, the more pairs it has
    rank   0 0 0 1 1 1 1 1 1 0
    ```
    """
    first, last = 0, length
    found = []
    for count, pairs in shares[:-1]:
        left = last - first - count
        if count < 0 or left <= 0:
            return None
        # Tokens a to b have b * b - a * a; of both spans together that is linear in how many are in front.
        front = round((2 * last * count - count * count - pairs) / (2 * left))
        if not 0 <= front <= count:
            return None
        found.append(_joined([Span(first, first + front), Span(last - count + front, last)]))
        first, last = first + front, last - count + front
    return [*found, _kept([Span(first, last)])]


def divide(spans: Spans, parts: int, turn: int) -> list[Spans]:
    """The tokens of `spans`, in order, in `parts` shares of like size; a share may be of several spans."""
    return [_within(spans, share) for share in cut(0, tokens(spans), parts, turn)]


def divide_all(sequences: Sequence[Spans], parts: int) -> list[list[Spans]]:
    """As `divide` for the tokens of all sequences, one after another; by part, the spans of each sequence."""
    shares = cut(0, sum(map(tokens, sequences)), parts)
    found: list[list[Spans]] = [[()] * len(sequences) for _ in shares]
    begin = 0
    for index, spans in enumerate(sequences):
        end = begin + tokens(spans)
        for part, share in enumerate(shares):
            if share.start < end and begin < share.stop:
                found[part][index] = _within(spans, Span(share.start - begin, share.stop - begin))
        begin = end
    return found


def tokens(spans: Sequence[Span]) -> int:
    """How many tokens these spans hold."""
    return sum(span.length for span in spans)


def _within(spans: Spans, share: Span) -> Spans:
    """The tokens of `spans`, counted from the first, that a share has."""
    taken, passed = [], 0
    for span in spans:
        start = max(share.start - passed, 0)
        stop = min(share.stop - passed, span.length)
        if start < stop:
            taken.append(Span(span.start + start, span.start + stop))
        passed += span.length
    return tuple(taken)


def _kept(spans: Sequence[Span]) -> Spans:
    return tuple(span for span in spans if span.length)


def _joined(spans: Sequence[Span]) -> Spans:
    """`spans` in order, without empty ones, neighbours as one."""
    joined: list[Span] = []
    for span in _kept(spans):
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)
