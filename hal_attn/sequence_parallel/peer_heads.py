"""The exchange of heads by copy engines: each rank writes its rows of another's heads where that one reads them.

A row of some heads is a run of bytes, and the rows of a tensor lie evenly apart, so an engine copies them as a
rectangle: nothing is packed before, and nothing joined after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal_attn.sequence_parallel.driver import Copy
from hal_attn.sequence_parallel.peers import PeerCopies, PeerTransfer, Posting, Tensors, places
from hal_attn.sequence_parallel.slots import Slots, rounded
from hal_attn.sequence_parallel.spans import Span

if TYPE_CHECKING:
    from hal_attn.sequence_parallel.ulysses import Side

Copies = Callable[[Slots, int, int], Iterator[Copy]]
# Shorter rows take an engine longer than a kernel takes to pack them.
_LEAST_WIDTH = 256


@dataclass(frozen=True)
class _Part:
    """One tensor of an exchange, in bytes: rows of `widths[rank]` at `starts[rank]` of each row here.

    Attributes:
        tensor: rows `[n, ...]`, of which each lies densely, `pitch` apart.
    """

    tensor: Tensor
    widths: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, heads: Sequence[Span]) -> _Part:
        """Of a tensor `[n, H, d]` and the heads of each rank."""
        rows, number, dim = tensor.shape
        size = dim * tensor.element_size()
        # Rows that lie on one another, as those of an expanded tensor, are no rectangle.
        apart = rows <= 1 or tensor.stride(0) >= number * dim
        if not (apart and tensor.stride(2) == 1 and tensor.stride(1) == dim):
            tensor = tensor.contiguous()
        return cls(tensor, tuple(span.length * size for span in heads), tuple(span.start * size for span in heads))

    @property
    def pitch(self) -> int:
        return self.tensor.stride(0) * self.tensor.element_size()


def there(peers: PeerCopies, own: int, sides: Sequence[Side]) -> PeerTransfer | None:
    """Tensors `[T, H, d]` of this rank's tokens for those of its heads: by rank, all own rows, then the replicated ones
    `[T', H', d]`; None where another way is better."""
    if not _fits(peers, sides):
        return None
    parts = [_Part.of(rows.own.take(tensor), heads) for tensor, rows, heads in sides]
    kept = [_Part.of(rows.replicated.take(tensor), heads) for tensor, rows, heads in sides]
    totals = [sum(rows.counts) + rows.replicated.count for _, rows, _ in sides]
    sizes = [
        [total * part.widths[rank] for total, part in zip(totals, parts, strict=True)]
        for rank in range(len(parts[0].widths))
    ]

    def copies(slots: Slots, slot: int, rank: int) -> Iterator[Copy]:
        begin = slots.addresses[rank] + slots.begin(slot)
        for (_, rows, _), part, again, place in zip(sides, parts, kept, places(sizes[rank]), strict=True):
            width, pitch = part.widths[rank], part.pitch
            first = begin + place + sum(rows.counts[:own]) * width
            yield Copy(first, part.tensor.data_ptr() + part.starts[rank], width, rows.own.count, width, pitch)
            if rank == own and rows.replicated.count:
                first = begin + place + sum(rows.counts) * width
                source = again.tensor.data_ptr() + again.starts[rank]
                yield Copy(first, source, width, rows.replicated.count, width, again.pitch)

    received = [
        ((total, heads[own].length, tensor.shape[2]), tensor.dtype)
        for total, (tensor, _, heads) in zip(totals, sides, strict=True)
    ]
    return _post(peers, own, tuple(part.tensor for part in (*parts, *kept)), sizes, copies, received)


def back(peers: PeerCopies, own: int, sides: Sequence[Side], results: Sequence[Tensor]) -> PeerTransfer | None:
    """Tensors `[T', H', d]` of this rank's heads for those of its tokens, `[n, H, d]` as in `results`, of which
    only the heads of `sides` are written; None where another way is better."""
    if any(_overlap(heads) for _, _, heads in sides) or not _fits(peers, sides):
        return None
    whole = [[Span(0, heads[own].length)] * len(heads) for _, _, heads in sides]
    ranks = range(len(sides[0][2]))
    parts = [
        [_Part.of(rows.of_rank[rank].take(tensor), spans) for rank in ranks]
        for (tensor, rows, _), spans in zip(sides, whole, strict=True)
    ]
    pitches = [result.shape[1] * result.shape[2] * result.element_size() for result in results]
    sizes = [
        [rows.of_rank[rank].count * pitch for (_, rows, _), pitch in zip(sides, pitches, strict=True)] for rank in ranks
    ]

    def copies(slots: Slots, slot: int, rank: int) -> Iterator[Copy]:
        begin = slots.addresses[rank] + slots.begin(slot)
        for (tensor, rows, heads), part, pitch, place in zip(sides, parts, pitches, places(sizes[rank]), strict=True):
            first = begin + place + heads[own].start * tensor.shape[2] * tensor.element_size()
            count, mine = rows.of_rank[rank].count, part[rank]
            yield Copy(first, mine.tensor.data_ptr(), mine.widths[rank], count, pitch, mine.pitch)

    received = [
        ((rows.of_rank[own].count, *result.shape[1:]), result.dtype)
        for (_, rows, _), result in zip(sides, results, strict=True)
    ]
    return _post(peers, own, tuple(part.tensor for each in parts for part in each), sizes, copies, received)


def _post(
    peers: PeerCopies,
    own: int,
    sources: Tensors,
    sizes: Sequence[Sequence[int]],
    copies: Copies,
    received: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> PeerTransfer:
    """By rank, `sizes` in bytes of the tensors in its slot; `received`: shapes and dtypes of those in the own one."""
    others = [rank for rank in range(len(sizes)) if rank != own]

    def posting(slots: Slots, slot: int) -> Posting:
        # The own part last: within a GPU a copy may be a kernel, which waits for the attention that is under way.
        there = {rank: list(copies(slots, slot, rank)) for rank in (*others, own)}
        return Posting(there, others, peers.views(slots, slot, received))

    return peers.post(sources, max(sum(map(rounded, rank)) for rank in sizes), posting)


def _fits(peers: PeerCopies, sides: Sequence[Side]) -> bool:
    """Whether engines can, and are quicker; every rank finds the same."""
    for tensor, _, heads in sides:
        size = tensor.shape[2] * tensor.element_size()
        if any(0 < span.length * size < _LEAST_WIDTH for span in heads):
            return False
    return peers.take([tensor for tensor, _, _ in sides])


def _overlap(heads: Sequence[Span]) -> bool:
    """Whether some head is several ranks', as a key head is that they share."""
    kept = sorted(span for span in heads if span.length)
    return any(before.stop > after.start for before, after in pairwise(kept))
