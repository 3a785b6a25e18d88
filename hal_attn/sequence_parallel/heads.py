"""Which heads each `ulysses` rank computes: all query heads once, each key head only where a query head reads it.

```
6 query heads over 2 key heads, 4 ranks      rank     0     1     2    3
                                             query   0     1 2    3    4 5
                                             key     0     0      1    1      each key head goes to 2 ranks, not to 4
```
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from hal_attn.sequence_parallel.spans import Span, cut


@dataclass(frozen=True)
class HeadShare:
    """Heads of one rank, or of one turn of its pipeline: `queries` of all query heads, `keys` of all key heads.

    `repeat` is, for each of these query heads, the place among `keys` of the key head that it reads; None where that is
    already `h // (H // Hkv)`, as kernels count.
    """

    queries: Span
    keys: Span
    repeat: tuple[int, ...] | None


@dataclass(frozen=True)
class HeadSplit:
    """`heads` query heads over `kv_heads` key heads, on `ranks` ranks."""

    heads: int
    kv_heads: int
    ranks: int

    @cached_property
    def shares(self) -> tuple[HeadShare, ...]:
        """By rank. Whole groups of heads where there are enough key heads, else query heads."""
        group = self.heads // self.kv_heads
        if self.kv_heads >= self.ranks:
            spans = [Span(s.start * group, s.stop * group) for s in cut(0, self.kv_heads, self.ranks)]
        else:
            spans = cut(0, self.heads, self.ranks, self.ranks - 1)
        return tuple(self._share(span) for span in spans)

    @cached_property
    def shared(self) -> bool:
        """Some key head goes to several ranks, so that its gradient is a sum."""
        return sum(share.keys.length for share in self.shares) > self.kv_heads

    def turns(self, most: int) -> int:
        """How many turns of a pipeline every rank can divide its heads into, each of whole groups; at most `most`."""
        return max(1, min(most, *(share.keys.length if share.repeat is None else 1 for share in self.shares)))

    def turn(self, share: HeadShare, index: int, turns: int) -> HeadShare:
        """The heads of one turn of `turns`."""
        if turns == 1:
            return share
        group = self.heads // self.kv_heads
        keys = cut(share.keys.start, share.keys.stop, turns)[index]
        return self._share(
            Span(max(keys.start * group, share.queries.start), min(keys.stop * group, share.queries.stop))
        )

    def _share(self, queries: Span) -> HeadShare:
        group = self.heads // self.kv_heads
        if not queries.length:
            return HeadShare(queries, Span(0, 0), None)
        keys = Span(queries.start // group, (queries.stop - 1) // group + 1)
        reads = tuple(head // group - keys.start for head in range(*queries))
        even, rest = divmod(queries.length, keys.length)
        as_kernels = () if rest else tuple(head // even for head in range(queries.length))
        return HeadShare(queries, keys, None if reads == as_kernels else reads)


@lru_cache(maxsize=64)
def pipeline(split: HeadSplit, most: int) -> tuple[tuple[HeadShare, ...], ...]:
    """`[turn][rank]` -> its heads, in at most `most` turns."""
    count = split.turns(most)
    return tuple(tuple(split.turn(share, index, count) for share in split.shares) for index in range(count))
