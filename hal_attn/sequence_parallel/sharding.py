"""Who holds what: for each rank, the tokens of each sequence in its tensors, replicated ones at both ends.

```
one sequence of 12, replicated_prefix=2, replicated_suffix=1, contiguous over 3 ranks

token     0 1 | 2 3 4 | 5 6 7 | 8 9 10 | 11
rank 0    0 1 | 2 3 4 |       |        | 11       rows: prefix | own | suffix, sequence after sequence
rank 1    0 1 |       | 5 6 7 |        | 11
rank 2    0 1 |       |       | 8 9 10 | 11
```

Ranks have two coordinates: `ring`, among those that exchange keys, and `ulysses`, among those that exchange heads. The
`ulysses` ranks of one `ring` coordinate divide its tokens once more; after their exchange each holds all of them, for
some heads (`chunk`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hal_attn.sequence_parallel.blocks import Segment
from hal_attn.sequence_parallel.spans import Span, Spans, deal, divide, divide_all, give
from hal_attn.sequence_parallel.whole import Placement


@dataclass(frozen=True)
class Rows:
    """The rows of one tensor, sequence after sequence: replicated prefix, own spans, replicated suffix.

    `pieces[n]` are sequence `n`'s spans in row order, each with whether it is replicated; `lengths` its tokens in all.
    """

    pieces: tuple[tuple[tuple[Span, bool], ...], ...]
    lengths: tuple[int, ...]

    @cached_property
    def count(self) -> int:
        """Rows in all."""
        return sum(span.length for sequence in self.pieces for span, _ in sequence)

    @cached_property
    def segments(self) -> tuple[tuple[tuple[Segment, bool], ...], ...]:
        """`pieces` with the row where each begins."""
        found, row = [], 0
        for sequence in self.pieces:
            placed = []
            for span, replicated in sequence:
                placed.append((Segment(span, row), replicated))
                row += span.length
            found.append(tuple(placed))
        return tuple(found)

    def of(self, sequence: int, *, own: bool = True, replicated: bool = True) -> list[Segment]:
        """The segments of one sequence, of the kinds asked for."""
        wanted = {False: own, True: replicated}
        return [segment for segment, kind in self.segments[sequence] if wanted[kind]]

    @cached_property
    def positions(self) -> Tensor:
        """Each row's place in its sequence, int64."""
        return concatenated(torch.arange(span.start, span.stop) for s in self.pieces for span, _ in s)

    @cached_property
    def tokens(self) -> Tensor:
        """Each row's token among all tokens of the packed batch, int64."""
        parts, begin = [], 0
        for sequence, length in zip(self.pieces, self.lengths, strict=True):
            parts += [torch.arange(begin + span.start, begin + span.stop) for span, _ in sequence]
            begin += length
        return concatenated(parts)

    @cached_property
    def own(self) -> Tensor:
        """The rows that no other rank holds, int64."""
        return self._rows_that(replicated=False)

    @cached_property
    def replicated(self) -> Tensor:
        """The rows that every rank holds, int64."""
        return self._rows_that(replicated=True)

    def _rows_that(self, replicated: bool) -> Tensor:
        return concatenated(
            torch.arange(segment.row, segment.row + segment.span.length)
            for sequence in self.segments
            for segment, kind in sequence
            if kind == replicated
        )

    @property
    def only_own(self) -> Rows:
        """The same without the replicated rows: what travels."""
        pieces = tuple(tuple(piece for piece in sequence if not piece[1]) for sequence in self.pieces)
        return Rows(pieces, self.lengths)


@dataclass(frozen=True)
class Sharding:
    """Queries or keys of all sequences over `ring * ulysses` ranks; `prefix` and `suffix` tokens are on every rank.

    `placement`: which sequences are whole on a `ring` coordinate, or are cut otherwise than in like parts. `alike`:
    sequences of one length are cut alike, as a dense batch needs; else the longer shares take turns. `as_one`: a
    coordinate's tokens are one run for its `ulysses` ranks, of which each has a part that lies together.
    """

    lengths: tuple[int, ...]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    placement: Placement
    ring: int
    ulysses: int
    zigzag: bool
    alike: bool = False
    as_one: bool = False

    @cached_property
    def _dealt(self) -> list[list[Spans]]:
        """`[sequence][ring coordinate]` -> its own spans."""
        dealt = []
        for index, (length, before, after) in enumerate(self._sequences()):
            owner, uneven = self.placement.owners[index], self.placement.uneven.get(index)
            if uneven is not None:
                dealt.append(list(uneven))
            elif owner is None:
                dealt.append(deal(before, length - after, self.ring, self._turn(index), self.zigzag))
            else:
                dealt.append(give(before, length - after, self.ring, owner))
        return dealt

    def chunk(self, ring: int) -> Rows:
        """What a rank holds after the exchange of heads: all tokens of its ring coordinate."""
        return self._rows([sequence[ring] for sequence in self._dealt])

    def local(self, ring: int, ulysses: int) -> Rows:
        """What a rank holds before: its share of these."""
        if (ring, ulysses) not in self._locals:
            self._locals[ring, ulysses] = self._local(ring, ulysses)
        return self._locals[ring, ulysses]

    @cached_property
    def _locals(self) -> dict[tuple[int, int], Rows]:
        return {}

    def _local(self, ring: int, ulysses: int) -> Rows:
        if self.as_one:
            return self._rows(self._runs[ring][ulysses])
        shares = [divide(s[ring], self.ulysses, self._turn(index))[ulysses] for index, s in enumerate(self._dealt)]
        return self._rows(shares)

    @cached_property
    def _runs(self) -> list[list[list[Spans]]]:
        """`[ring coordinate][rank of its heads][sequence]` -> own spans, of each coordinate's tokens as one run."""
        return [divide_all([sequence[ring] for sequence in self._dealt], self.ulysses) for ring in range(self.ring)]

    def _turn(self, sequence: int) -> int:
        return 0 if self.alike else sequence

    def _rows(self, own: Sequence[Spans]) -> Rows:
        pieces = []
        for (length, before, after), spans in zip(self._sequences(), own, strict=True):
            ends = [(Span(0, before), True)], [(Span(length - after, length), True)]
            pieces.append(tuple(p for p in (*ends[0], *((s, False) for s in spans), *ends[1]) if p[0].length))
        return Rows(tuple(pieces), self.lengths)

    def _sequences(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.lengths, self.prefix, self.suffix, strict=True)


def concatenated(parts: Iterable[Tensor]) -> Tensor:
    """Row numbers one after another, int64; none of no parts."""
    found = list(parts)
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
