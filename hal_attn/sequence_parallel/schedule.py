"""Which keys meet which queries, and when: the hops of a ring, the one gather, and the calls of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hal_attn.sequence_parallel.blocks import Block, Segment, blocks
from hal_attn.sequence_parallel.description import Description
from hal_attn.sequence_parallel.kernel import MaskedHop, band_between
from hal_attn.sequence_parallel.sharding import Rows, Sharding, concatenated
from hal_attn.sequence_parallel.spans import Span, tokens
from hal_attn.sequence_parallel.work import Call, RowSet, calls


@dataclass(frozen=True)
class Schedule:
    """For one description over `queries.ring` coordinates: what each coordinate needs, sends and computes.

    `gathered`: remote keys come at once instead of hop by hop.
    """

    description: Description
    queries: Sharding
    keys: Sharding
    gathered: bool

    @property
    def ranks(self) -> int:
        return self.queries.ring

    @cached_property
    def chunks_q(self) -> tuple[Rows, ...]:
        """The query rows of each coordinate."""
        return tuple(self.queries.chunk(rank) for rank in range(self.ranks))

    @cached_property
    def chunks_k(self) -> tuple[Rows, ...]:
        """The key rows of each coordinate, replicated ones among them."""
        return tuple(self.keys.chunk(rank) for rank in range(self.ranks))

    @cached_property
    def _own(self) -> tuple[Rows, ...]:
        """The key rows that only one coordinate holds."""
        return tuple(rows.only_own for rows in self.chunks_k)

    @cached_property
    def travelling(self) -> tuple[Rows, ...]:
        """The own key rows of each coordinate that queries of any other see: what goes around a ring."""
        ranks = range(self.ranks)
        return tuple(self._seen_of(source, [rank for rank in ranks if rank != source]) for source in ranks)

    def travelling_rows(self, rank: int) -> RowSet:
        """Which of `chunks_k[rank]` these are."""
        return self._places(rank, self.travelling[rank])

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """How far keys have come at each hop of the ring, from 0; hops at which no rank has anything to compute left
        out, for all ranks alike."""
        needed = [
            hop
            for hop in range(1, self.ranks)
            if any(self.needed(rank, (rank - hop) % self.ranks).count for rank in range(self.ranks))
        ]
        return (0, *needed)

    def needed(self, rank: int, source: int) -> Rows:
        """The own key rows of `source` that own queries of `rank` see."""
        if (rank, source) not in self._needed:
            self._needed[rank, source] = self._seen_of(source, [rank])
        return self._needed[rank, source]

    @cached_property
    def _needed(self) -> dict[tuple[int, int], Rows]:
        return {}

    def _seen_of(self, source: int, ranks: Sequence[int]) -> Rows:
        """The own key rows of `source` that own queries of any of `ranks` see."""
        pieces = []
        for sequence, own in enumerate(self._own[source].pieces):
            queries = [s.span for rank in ranks for s in self.chunks_q[rank].of(sequence, replicated=False)]
            seen = self._seen(sequence, queries) if own else []
            pieces.append(tuple((part, False) for span, _ in own for part in _overlap(span, seen)))
        return Rows(tuple(pieces), self.keys.lengths)

    def _places(self, rank: int, rows: Rows) -> RowSet:
        """Which of `chunks_k[rank]` these rows are, all of them there."""
        chunk = self.chunks_k[rank]
        place = torch.full((sum(chunk.lengths),), -1, dtype=torch.int64)
        place[chunk.tokens] = torch.arange(chunk.count)
        return RowSet.of_index(place[rows.tokens], chunk.count)

    def _seen(self, sequence: int, queries: Sequence[Span]) -> list[Span]:
        """The key positions that any of these queries sees, as spans apart from one another."""
        band, length = self.description.band(sequence), self.keys.lengths[sequence]
        found = sorted(
            Span(max(0, band.first_key(span.start)), band.end_of_keys(span.stop - 1, length)) for span in queries
        )
        apart: list[Span] = []
        for span in found:
            if span.start >= span.stop:
                continue
            if apart and span.start <= apart[-1].stop:
                apart[-1] = Span(apart[-1].start, max(apart[-1].stop, span.stop))
            else:
                apart.append(span)
        return apart

    def sends(self, rank: int) -> tuple[RowSet, ...]:
        """By destination, the rows of `chunks_k[rank]` that it is sent in the gather."""
        nothing = RowSet.of_index(torch.zeros(0, dtype=torch.int64), self.chunks_k[rank].count)
        return tuple(self._places(rank, self.needed(to, rank)) if to != rank else nothing for to in range(self.ranks))

    def receives(self, rank: int) -> tuple[int, ...]:
        """By source, how many rows come from it in the gather."""
        return tuple(0 if source == rank else self.needed(rank, source).count for source in range(self.ranks))

    def calls(self, rank: int) -> tuple[tuple[Call, ...], ...]:
        """`[hop]` -> the kernel calls of this coordinate."""
        total = self.chunks_q[rank].count
        found = [calls(self._at_home(rank), total, self.chunks_k[rank].count)]
        for arriving, count in self._arrivals(rank):
            met = self._meeting(rank, arriving)
            found.append(calls(met, total, count))
        return tuple(found)

    def masked_hops(self, rank: int) -> tuple[MaskedHop, ...]:
        """`[hop]` -> the rows of each sequence and their positions, for a dense batch: its sequences are alike."""
        chunk_q, chunk_k = self.chunks_q[rank], self.chunks_k[rank]
        count = len(chunk_q.pieces)
        if not count:
            return ()
        queries, keys = (Rows(rows.pieces[:1], rows.lengths[:1]) for rows in (chunk_q, chunk_k))
        rows_q, rows_k = (torch.arange(count * rows.count).view(count, -1) for rows in (queries, keys))
        found = [self._masked_hop(rows_q, rows_k, queries.positions, keys.positions, chunk_q.count, chunk_k.count)]
        if rank:
            found[0].visible[queries.replicated[:, None], keys.replicated] = False
        positions = queries.positions[queries.own]
        for arriving, total in self._arrivals(rank):
            places = concatenated([torch.arange(*segment.span) for segment in arriving[0]])
            rows_k = torch.stack([concatenated([_rows_of(s) for s in segments]) for segments in arriving])
            found.append(self._masked_hop(rows_q[:, queries.own], rows_k, positions, places, chunk_q.count, total))
        return tuple(found)

    def _masked_hop(
        self, rows_q: Tensor, rows_k: Tensor, positions: Tensor, positions_k: Tensor, total_q: int, total_k: int
    ) -> MaskedHop:
        return MaskedHop(
            RowSet.of_index(rows_q.flatten(), total_q),
            RowSet.of_index(rows_k.flatten(), total_k),
            positions.numel(),
            positions_k.numel(),
            RowSet.of_index(positions, self.queries.lengths[0]),
            RowSet.of_index(positions_k, self.keys.lengths[0]),
            band_between(positions, positions_k, self.description.band(0)),
        )

    def _arrivals(self, rank: int) -> list[tuple[list[list[Segment]], int]]:
        """Each remote buffer: its segments by sequence, and its rows."""
        if self.ranks == 1:
            return []
        if not self.gathered:
            sources = [(rank - hop) % self.ranks for hop in self.hops[1:]]
            rows = [self.travelling[source] for source in sources]
            return [([buffer.of(n) for n in range(len(buffer.pieces))], buffer.count) for buffer in rows]
        merged: list[list[Segment]] = [[] for _ in self.keys.lengths]
        begin = 0
        for source in range(self.ranks):
            if source == rank:
                continue
            buffer = self.needed(rank, source)
            for sequence, segments in enumerate(merged):
                segments += [Segment(s.span, s.row + begin) for s in buffer.of(sequence)]
            begin += buffer.count
        return [(merged, begin)]

    def _at_home(self, rank: int) -> Iterable[Block]:
        queries, keys = self.chunks_q[rank], self.chunks_k[rank]
        for sequence in range(len(queries.pieces)):
            band = self.description.band(sequence)
            if rank == 0:
                yield from blocks(queries.of(sequence), keys.of(sequence), band)
                continue
            yield from blocks(queries.of(sequence, replicated=False), keys.of(sequence), band)
            yield from blocks(queries.of(sequence, own=False), keys.of(sequence, replicated=False), band)

    def _meeting(self, rank: int, arriving: list[list[Segment]]) -> Iterable[Block]:
        queries = self.chunks_q[rank]
        for sequence, segments in enumerate(arriving):
            own = queries.of(sequence, replicated=False)
            yield from blocks(own, segments, self.description.band(sequence))


def _overlap(span: Span, seen: Sequence[Span]) -> list[Span]:
    parts = [Span(max(span.start, other.start), min(span.stop, other.stop)) for other in seen]
    return [part for part in parts if tokens([part]) > 0]


def _rows_of(segment: Segment) -> Tensor:
    return torch.arange(segment.row, segment.row + segment.span.length)
