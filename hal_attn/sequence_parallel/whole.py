"""Which sequences of a packed batch need not be cut, each coordinate having as much all the same.

```
lengths, 2 coordinates    900   512   510   64   64   7
coordinate 0              450   512         64              what is whole is computed where it lies: none of its keys
coordinate 1              450         510        64   7     travel, and no partial results of it are joined
```

Of n sequences about as long each of n coordinates has one. Of the others the longest are cut, and only as many as leave
each coordinate nearly the tokens and the work that it would have with all of them cut. Under causal it takes fewest,
because where a sequence is cut decides how many tokens a coordinate has of it, and how much work:

```
lengths, 2 coordinates    8192                       4096   2048   1024   512   ...
coordinate 0              first 2678 and last 1386   4096
coordinate 1              4128 between                      2048   1024   512   ...
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hal_attn.sequence_parallel.spans import Spans, nest
from hal_attn.sequence_parallel.work import visible_pairs

# Own lengths that differ by at most one part in so many are about the same, and so are sums of them. Of sequences that
# are about as long a coordinate has as much more of one at most, since the next ones even it out; of work, which grows
# with queries times keys, twice that part.
_NEAR = 64
# Sequences that are tried to be cut before all are; of 16 lengths at random, one or two are on 2 to 4 coordinates.
_MOST_CUT = 8


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
    total = sum((_Load.of(each, band) for each in sequences), _Load())
    longest = sequences[rest[0]]
    for cut in range(min(len(rest), _MOST_CUT + 1)):
        found, loads = _whole(sequences, even, rest[cut:], band, coordinates)
        if cut and band == (-1, 0) and longest.queries == longest.keys:
            spans = _evening(longest.queries, loads)
            if spans is not None:
                return Placement(found, {rest[0]: spans})
        if all(max(kind) - min(kind) <= most / coordinates / _NEAR for *kind, most in zip(*loads, total, strict=True)):
            return Placement(found, {})
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

    @classmethod
    def of(cls, sequence: Tokens, band: tuple[int, int]) -> _Load:
        queries, keys = sequence[:2]
        return cls(queries, keys, visible_pairs(queries, keys, *band))

    def __add__(self, other: _Load) -> _Load:  # type: ignore[override]
        return _Load(*map(sum, zip(self, other, strict=True)))


def _whole(
    sequences: Sequence[Tokens], even: Sequence[int | None], more: Sequence[int], band: tuple[int, int], count: int
) -> tuple[tuple[int | None, ...], list[_Load]]:
    """The owners of those in `even` and of `more`, the longest first, and what each of `count` coordinates has then."""
    found, loads = list(even), [_Load()] * count
    for index, owner in enumerate(even):
        if owner is not None:
            loads[owner] += _Load.of(sequences[index], band)
    for index in more:
        lightest = min(range(count), key=lambda coordinate: loads[coordinate])
        found[index] = lightest
        loads[lightest] += _Load.of(sequences[index], band)
    return tuple(found), loads


def _evening(length: int, loads: Sequence[_Load]) -> tuple[Spans, ...] | None:
    """The spans of a causal sequence with which each coordinate has as many queries and pairs as the others."""
    count = len(loads)
    # Causal tokens a to b see (b * (b + 1) - a * (a + 1)) / 2; what is linear in tokens is even where these are.
    squares = [2 * load.pairs - load.queries for load in loads]
    queries, square = length + sum(load.queries for load in loads), length**2 + sum(squares)
    shares = [
        ((queries + coordinate) // count - load.queries, square / count - squares[coordinate])
        for coordinate, load in enumerate(loads)
    ]
    # Who has many pairs for its tokens lies inside or outside, whichever there is room for.
    outwards = sorted(range(count), key=lambda coordinate: shares[coordinate][1] / max(1, shares[coordinate][0]))
    for order in (outwards, outwards[::-1]):
        spans = nest(length, [shares[coordinate] for coordinate in order])
        if spans is not None:
            return tuple(spans[order.index(coordinate)] for coordinate in range(count))
    return None
