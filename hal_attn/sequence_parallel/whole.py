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

# Lengths that differ by at most one part in so many are about the same: so much more work than another has a
# coordinate at most, of one sequence, since the next ones even it out.
_NEAR = 64


def owners(lengths: Sequence[int], lengths_k: Sequence[int], coordinates: int) -> tuple[int | None, ...]:
    """By sequence, the coordinate that has all of it; None where it is cut."""
    found: list[int | None] = [None] * len(lengths)
    if coordinates == 1:
        return tuple(found)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], -lengths_k[index], index))
    load, first = [0] * coordinates, 0
    while first + coordinates <= len(order):
        group = order[first : first + coordinates]
        if not all(_near([side[index] for index in group]) for side in (lengths, lengths_k)):
            first += 1
            continue
        lightest = sorted(range(coordinates), key=lambda coordinate: (load[coordinate], coordinate))
        for index, coordinate in zip(group, lightest, strict=True):
            found[index] = coordinate
            load[coordinate] += lengths[index]
        first += coordinates
    return tuple(found)


def _near(lengths: Sequence[int]) -> bool:
    return max(lengths) - min(lengths) <= max(lengths) // _NEAR
