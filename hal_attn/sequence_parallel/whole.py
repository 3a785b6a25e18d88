"""Which sequences of a packed batch need not be cut: of n about as long, each of n coordinates has one whole.

```
lengths, 2 coordinates    900   512   510   64   64   7
coordinate 0              450   512         64        4     what is whole is computed where it lies: none of its keys
coordinate 1              450         510        64   3     travel, and no partial results of it are joined
```

A coordinate has nearly the tokens and the work that it would have with all of them cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Own lengths that differ by at most one part in so many are about the same. A coordinate has as much more of one
# sequence at most, since the next ones even it out; of work, which grows with queries times keys, twice that part.
_NEAR = 64


class Tokens(NamedTuple):
    """What there is of one sequence: queries and keys that one rank holds, and `ends`, what every rank holds of it."""

    queries: int
    keys: int
    ends: tuple[int, ...] = ()


def owners(sequences: Sequence[Tokens], coordinates: int) -> tuple[int | None, ...]:
    """By sequence, the coordinate that has all of it; None where it is cut."""
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
