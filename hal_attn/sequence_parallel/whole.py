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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import NamedTuple

from hal_attn.sequence_parallel.spans import Span, Spans, deal, nest, tokens
from hal_attn.sequence_parallel.work import visible_pairs, visible_to

# Own lengths that differ by at most one part in so many are about the same, and so are sums of them. Of sequences that
# are about as long a coordinate has as much more of one at most, since the next ones even it out; of work, which grows
# with queries times keys, twice that part.
_NEAR = 64
# So many sequences are tried to be cut before all are; so many are tried as the second one that is cut unevenly, and so
# many placed for that.
_MOST_CUT, _MOST_TRIED, _MOST_PLACED = 512, 16, 1024


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


def placed(sequences: Sequence[Tokens], coordinates: int, band: tuple[int, int], zigzag: bool) -> Placement:
    """Where each sequence lies; `band` is (left, right), -1 unlimited, and `zigzag` how they are cut in like parts."""
    even = owners(sequences, coordinates)
    rest = [
        index
        for index, owner in enumerate(even)
        if owner is None and max(sequences[index][:2]) and not any(sequences[index].ends)
    ]
    if coordinates == 1 or not rest:
        return Placement(even, {})
    rest.sort(key=lambda index: (-sequences[index].queries, -sequences[index].keys, index))
    batch = _Batch(sequences, even, tuple(rest), band, coordinates, zigzag)
    for cut in _cuts(len(rest)):
        for found in batch.tried(cut):
            if found is not None:
                return found
    return Placement(even, {})


def _cuts(sequences: int) -> Iterator[int]:
    """How many are tried to be cut: each number at first, then in growing steps; one at least is left."""
    cut = 0
    while cut < min(sequences, _MOST_CUT):
        yield cut
        cut += 1 if cut < 8 else cut // 2


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
        return _Load(self.queries + other.queries, self.keys + other.keys, self.pairs + other.pairs)

    def __sub__(self, other: _Load) -> _Load:
        return _Load(self.queries - other.queries, self.keys - other.keys, self.pairs - other.pairs)


@dataclass(frozen=True)
class _Batch:
    """Sequences of which `even` says who owns some, and what is tried with `rest`, the longest first."""

    sequences: Sequence[Tokens]
    even: Sequence[int | None]
    rest: Sequence[int]
    band: tuple[int, int]
    count: int
    zigzag: bool

    @cached_property
    def loads(self) -> tuple[_Load, ...]:
        """Of each sequence."""
        return tuple(_Load(q, k, visible_pairs(q, k, *self.band)) for q, k, _ in self.sequences)

    @cached_property
    def total(self) -> _Load:
        """Of all sequences."""
        return _Load(*map(sum, zip(*self.loads, strict=True)))

    @cached_property
    def _begun(self) -> tuple[_Load, ...]:
        """Of each coordinate, what it has in any case."""
        found, rest = [_Load()] * self.count, set(self.rest)
        for index, owner in enumerate(self.even):
            if owner is not None:
                found[owner] += self.loads[index]
            elif index not in rest:
                found = [load + part for load, part in zip(found, self._dealt(index), strict=True)]
        return tuple(found)

    def _dealt(self, index: int) -> list[_Load]:
        """Of each coordinate, what it has of a sequence that is cut in like parts."""
        queries, keys, _ = self.sequences[index]
        sides = [deal(0, length, self.count, index, self.zigzag) for length in (queries, keys)]
        return [
            _Load(tokens(own), tokens(own_k), sum(visible_to(*span, queries, keys, *self.band) for span in own))
            for own, own_k in zip(sides[0], sides[1], strict=True)
        ]

    def _cut(self, count: int) -> list[_Load]:
        """Of each coordinate, what it has in any case and of the first `count` of the rest, cut in like parts."""
        for index in self.rest[len(self._parts) - 1 : count]:
            added = zip(self._parts[-1], self._dealt(index), strict=True)
            self._parts.append([load + part for load, part in added])
        return self._parts[count]

    @cached_property
    def _parts(self) -> list[list[_Load]]:
        return [list(self._begun)]

    def whole(self, loads: Sequence[_Load], more: Sequence[int]) -> tuple[list[int | None], list[_Load]]:
        """The owners with `more` of the rest whole, beside what each coordinate has, and what it has then."""
        found, heap = list(self.even), [(load, coordinate) for coordinate, load in enumerate(loads)]
        heapify(heap)
        for index in more:
            load, lightest = heap[0]
            found[index] = lightest
            heapreplace(heap, (load + self.loads[index], lightest))
        return found, [load for load, _ in sorted(heap, key=lambda entry: entry[1])]

    def tried(self, cut: int) -> Iterator[Placement | None]:
        """With so many of the rest cut, some of them so that they even out the others; last with all in like parts."""
        rest, longest = self.rest, self.rest[0]
        if self.band == (-1, -1) and cut > 1 and self._square(longest):
            # The second one is any of those that are not longer than what is cut in like parts.
            few = max(1, min(_MOST_TRIED, _MOST_PLACED // len(rest)))
            for other in rest[cut - 1 :][:few]:
                if self._square(other):
                    more = [index for index in rest[cut - 1 :] if index != other]
                    yield self._evened((longest, other), cut - 1, more)
        elif self.band != (-1, -1) and cut and self._square(longest):
            yield self._evened((longest,), cut, rest[cut:])
        yield self._placement(*self.whole(self._cut(cut), rest[cut:]), {})

    def _evened(self, uneven: tuple[int, ...], cut: int, more: Sequence[int]) -> Placement | None:
        """With the first `cut` of the rest cut, but for the longest in like parts."""
        longest = zip(self._cut(cut), self._cut(1), self._cut(0), strict=True)
        found, loads = self.whole([load - (with_it - without) for load, with_it, without in longest], more)
        lengths = [self.sequences[index].queries for index in uneven]
        if len(lengths) == 2:
            spans = _of_two(lengths[0], lengths[1], loads)
        elif self.band == (-1, 0):
            spans = _of_causal(lengths[0], loads)
        else:
            spans = _in_turn(_queries(lengths[0], loads))
        return None if spans is None else self._placement(found, loads, dict(zip(uneven, spans, strict=True)))

    def _square(self, index: int) -> bool:
        queries, keys, _ = self.sequences[index]
        return queries == keys

    def _placement(
        self, found: list[int | None], loads: Sequence[_Load], uneven: Mapping[int, tuple[Spans, ...]]
    ) -> Placement | None:
        """With some cut unevenly, which `loads` has not; None where the coordinates would not have nearly as much."""
        loads, owned, parted = list(loads), list(found), {}
        reach = 0
        for index, parts in uneven.items():
            length = self.sequences[index].queries
            reach = max(reach, length if min(self.band) < 0 else min(length, sum(self.band) + 1))
            for coordinate, span in ((coordinate, span) for coordinate, spans in enumerate(parts) for span in spans):
                pairs = visible_to(*span, length, length, *self.band)
                loads[coordinate] += _Load(span.length, span.length, pairs)
            whose = [coordinate for coordinate, spans in enumerate(parts) if spans]
            if len(whose) == 1:
                owned[index] = whose[0]
            else:
                parted[index] = parts
        # What is cut unevenly is cut between tokens: two edges may each be half a token off.
        slack = _Load(1, 1, 2 * reach) if uneven else _Load()
        for side, most, off in zip(zip(*loads, strict=True), self.total, slack, strict=True):
            if max(side) - min(side) > max(most / self.count / _NEAR, off):
                return None
        return Placement(tuple(owned), parted)


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
