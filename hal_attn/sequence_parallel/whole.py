"""Which sequences of a packed batch need not be cut, each coordinate having as much all the same.

```
lengths, 2 coordinates    900   512   510   64   64   7
coordinate 0              450   512         64              what is whole is computed where it lies: none of its keys
coordinate 1              450         510        64   7     travel, and no partial results of it are joined
```

Of n sequences about as long each of n coordinates has one. Of the others the longest are cut, and only as many as leave
each coordinate nearly the tokens and the work that it would have with all of them cut. Some are cut unevenly, which
needs fewer: under causal one, since where it is cut decides how many tokens a coordinate has of it, and how much work;
where every key is seen two of different lengths, since a token of the longer one has more work; in a window one, since
tokens far from the ends have alike.

```
lengths, 2 coordinates    8192                       4096   2048   1024   512   ...    causal
coordinate 0              first 2678 and last 1386   4096
coordinate 1              4128 between                      2048   1024   512   ...
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from hal_attn.sequence_parallel.spans import Span, Spans, nest
from hal_attn.sequence_parallel.work import visible_pairs

# Own lengths that differ by at most one part in so many are about the same, and so are sums of them. Of sequences that
# are about as long a coordinate has as much more of one at most, since the next ones even it out; of work, which grows
# with queries times keys, twice that part.
_NEAR = 64
# Sequences that are tried to be cut before all are; of 16 lengths at random, one to three are on 2 to 4 coordinates.
_MOST_CUT = 8
# Sequences that are tried as the second one to be cut unevenly.
_MOST_TRIED = 32


class Tokens(NamedTuple):
    """What there is of one sequence: queries and keys that one rank holds, and `ends`, what every rank holds of it."""

    queries: int
    keys: int
    ends: tuple[int, ...] = ()


class Placement(NamedTuple):
    """By sequence, the coordinate that has all of it; None where it is cut. `uneven`: the spans of each coordinate, of
    sequences that are cut otherwise than in like parts."""

    owners: tuple[int | None, ...]
    uneven: Mapping[int, tuple[Spans, ...]]


def placed(sequences: Sequence[Tokens], coordinates: int, band: tuple[int, int]) -> Placement:
    """Where each sequence lies; `band` is (left, right), -1 unlimited."""
    even = owners(sequences, coordinates)
    rest = [index for index, owner in enumerate(even) if owner is None and max(sequences[index][:2])]
    if coordinates == 1 or not rest or any(any(sequences[index].ends) for index in rest):
        return Placement(even, {})
    rest.sort(key=lambda index: (-sequences[index].queries, -sequences[index].keys, index))
    batch = _Batch(sequences, even, band, coordinates)
    for cut in range(min(len(rest), _MOST_CUT + 1)):
        found = batch.evened(rest, cut) or batch.placement(rest[cut:], {})
        if found is not None:
            return found
    return Placement(even, {})


def owners(sequences: Sequence[Tokens], coordinates: int) -> tuple[int | None, ...]:
    """By sequence, the coordinate that has all of it, because others about as long balance it."""
    found: list[int | None] = [None] * len(sequences)
    if coordinates == 1:
        return tuple(found)
    order = sorted(range(len(sequences)), key=lambda index: (sequences[index], -index), reverse=True)
    load, first = [(0, 0)] * coordinates, 0
    while first + coordinates <= len(order):
        group = order[first : first + coordinates]
        if not _near([sequences[index] for index in group]):
            first += 1
            continue
        lightest = sorted(range(coordinates), key=lambda coordinate: (load[coordinate], coordinate))
        for index, coordinate in zip(group, lightest, strict=True):
            found[index] = coordinate
            queries, keys = load[coordinate]
            load[coordinate] = (queries + sequences[index].queries, keys + sequences[index].keys)
        first += coordinates
    return tuple(found)


def _near(group: Sequence[Tokens]) -> bool:
    sides = ([each.queries for each in group], [each.keys for each in group])
    close = all(max(side) - min(side) <= max(side) // _NEAR for side in sides)
    return close and len({each.ends for each in group}) == 1


class _Load(NamedTuple):
    """Tokens, and pairs of a query and a key that it sees."""

    queries: int = 0
    keys: int = 0
    pairs: int = 0

    def __add__(self, other: _Load) -> _Load:  # type: ignore[override]
        return _Load(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True)
class _Batch:
    """Sequences of which `even` says who owns some, and what is tried with the others."""

    sequences: Sequence[Tokens]
    even: Sequence[int | None]
    band: tuple[int, int]
    count: int

    @cached_property
    def loads(self) -> tuple[_Load, ...]:
        """Of each sequence."""
        return tuple(_Load(q, k, visible_pairs(q, k, *self.band)) for q, k, _ in self.sequences)

    @cached_property
    def _begun(self) -> tuple[_Load, ...]:
        """Of each coordinate, what it owns in any case."""
        found = [_Load()] * self.count
        for load, owner in zip(self.loads, self.even, strict=True):
            if owner is not None:
                found[owner] += load
        return tuple(found)

    def whole(self, more: Sequence[int]) -> tuple[list[int | None], list[_Load]]:
        """The owners with `more` sequences whole, and what each coordinate has then."""
        found, loads = list(self.even), list(self._begun)
        for index in more:
            lightest = min(range(self.count), key=lambda coordinate: loads[coordinate])
            found[index] = lightest
            loads[lightest] += self.loads[index]
        return found, loads

    def evened(self, rest: Sequence[int], cut: int) -> Placement | None:
        """`cut` of `rest` cut, some of them so that they even out the others; None where that cannot be."""
        if self.band == (-1, -1):
            # The second one: any but those that are longer and cut in like parts.
            pairs = [(rest[0], other) for other in rest[max(1, cut - 1) :][:_MOST_TRIED]] if cut > 1 else []
            tried = ([index for index in rest[cut - 1 :] if index != pair[1]] for pair in pairs)
            found = (self._evened(more, pair) for more, pair in zip(tried, pairs, strict=True))
            return next((placement for placement in found if placement is not None), None)
        return self._evened(rest[cut:], rest[:1]) if cut else None

    def _evened(self, more: Sequence[int], uneven: Sequence[int]) -> Placement | None:
        """With `more` whole."""
        if any(self.sequences[index].queries != self.sequences[index].keys for index in uneven):
            return None
        _, loads = self.whole(more)
        lengths = [self.sequences[index].queries for index in uneven]
        if len(lengths) == 2:
            spans = _of_two(lengths[0], lengths[1], loads)
        elif self.band == (-1, 0):
            spans = _of_causal(lengths[0], loads)
        else:
            spans = _in_turn(_queries(lengths[0], loads))
        return None if spans is None else self.placement(more, dict(zip(uneven, spans, strict=True)))

    def placement(self, more: Sequence[int], uneven: Mapping[int, tuple[Spans, ...]]) -> Placement | None:
        """With `more` whole and some cut unevenly; None where the coordinates would not have nearly as much."""
        found, loads = self.whole(more)
        longest = 0
        for index, parts in uneven.items():
            longest = max(longest, self.sequences[index].queries)
            for coordinate, span in ((coordinate, span) for coordinate, spans in enumerate(parts) for span in spans):
                loads[coordinate] += self._of_span(self.sequences[index].queries, span)
        # What is cut unevenly is cut between tokens, so that two edges may be half a token off.
        slack = _Load(1, 1, 4 * longest) if uneven else _Load()
        total = sum(self.loads, _Load())
        for side, most, off in zip(zip(*loads, strict=True), total, slack, strict=True):
            if max(side) - min(side) > max(most / self.count / _NEAR, off):
                return None
        return Placement(tuple(found), uneven)

    def _of_span(self, length: int, span: Span) -> _Load:
        """Of some queries of a sequence of as many keys as queries."""
        left, right = self.band
        keys = length if right < 0 else min(length, span.stop + right)
        # The band of the rectangle of these queries and the keys up to the last that they see.
        edges = (-1 if left < 0 else left + keys - span.stop, -1 if right < 0 else right + span.stop - keys)
        return _Load(span.length, span.length, visible_pairs(span.length, keys, *edges))


def _of_causal(length: int, loads: Sequence[_Load]) -> tuple[tuple[Spans, ...], ...] | None:
    """The spans of a causal sequence with which each coordinate has as many queries and pairs as the others."""
    count = len(loads)
    # Causal tokens a to b see (b * (b + 1) - a * (a + 1)) / 2; what is linear in tokens is even where these are.
    squares = [2 * load.pairs - load.queries for load in loads]
    square = length**2 + sum(squares)
    wanted = _queries(length, loads)
    shares = [(queries, square / count - own) for queries, own in zip(wanted, squares, strict=True)]
    # Who has many pairs for its tokens lies inside or outside, whichever there is room for.
    outwards = sorted(range(count), key=lambda coordinate: shares[coordinate][1] / max(1, shares[coordinate][0]))
    for order in (outwards, outwards[::-1]):
        spans = nest(length, [shares[coordinate] for coordinate in order])
        if spans is not None:
            return (tuple(spans[order.index(coordinate)] for coordinate in range(count)),)
    return None


def _of_two(longer: int, shorter: int, loads: Sequence[_Load]) -> tuple[tuple[Spans, ...], ...] | None:
    """The same of two sequences whose queries see all keys: a query of the longer one has more pairs."""
    if longer == shorter:
        return None
    pairs = (longer**2 + shorter**2 + sum(load.pairs for load in loads)) / len(loads)
    wanted = _queries(longer + shorter, loads)
    first = [
        round((pairs - load.pairs - shorter * queries) / (longer - shorter))
        for queries, load in zip(wanted, loads, strict=True)
    ]
    first[-1] = longer - sum(first[:-1])
    return _in_turn(first, [queries - count for queries, count in zip(wanted, first, strict=True)])


def _queries(length: int, loads: Sequence[_Load]) -> list[int]:
    """How many of `length` each coordinate has, so that all have as many as the others within one."""
    total = length + sum(load.queries for load in loads)
    return [(total + place) // len(loads) - load.queries for place, load in enumerate(loads)]


def _in_turn(*counts: Sequence[int]) -> tuple[tuple[Spans, ...], ...] | None:
    """Of each sequence, spans of so many tokens one after another; None where one would have less than none."""
    if min(map(min, counts)) < 0:
        return None
    return tuple(
        tuple((Span(end - count, end),) if count else () for count, end in zip(each, accumulate(each), strict=True))
        for each in counts
    )
