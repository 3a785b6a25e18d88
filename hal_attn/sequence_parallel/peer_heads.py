"""The exchange of heads by copy engines: each rank writes its rows of another's heads where that one reads them.

A row of some heads is a run of bytes, and the rows of a tensor lie evenly apart, so an engine copies them as a
rectangle: nothing is packed before, and nothing joined after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from hal_attn.sequence_parallel.driver import Copy
from hal_attn.sequence_parallel.peers import PeerCopies, PeerTransfer, Posting, Shapes, Tensors, places
from hal_attn.sequence_parallel.slots import Slots, rounded
from hal_attn.sequence_parallel.spans import Span

if TYPE_CHECKING:
    from hal_attn.sequence_parallel.ulysses import Side

Copies = Callable[[Slots, int, int], Iterator[Copy]]
# Shorter rows take an engine longer than a kernel takes to pack them.
_LEAST_WIDTH = 256


def there(peers: PeerCopies, own: int, sides: Sequence[Side]) -> PeerTransfer | None:
    """Tensors `[T, H, d]` of this rank's tokens for those of its heads: by rank, all own rows, then the replicated ones
    `[T', H', d]`; None where another way is better."""
    if not _fits(peers, sides):
        return None
    mine = [_rectangular(rows.own.take(tensor)) for tensor, rows, _ in sides]
    kept = [_rectangular(rows.replicated.take(tensor)) for tensor, rows, _ in sides]
    totals = [sum(rows.counts) + rows.replicated.count for _, rows, _ in sides]
    sizes = [
        [total * heads[rank].length * _head(tensor) for total, (tensor, _, heads) in zip(totals, sides, strict=True)]
        for rank in range(len(sides[0][2]))
    ]

    def copies(slots: Slots, slot: int, rank: int) -> Iterator[Copy]:
        begin = slots.addresses[rank] + slots.begin(slot)
        for (tensor, rows, heads), part, again, place in zip(sides, mine, kept, places(sizes[rank]), strict=True):
            width, skipped = heads[rank].length * _head(tensor), heads[rank].start * _head(tensor)
            first = begin + place + sum(rows.counts[:own]) * width
            yield Copy(first, part.data_ptr() + skipped, width, rows.own.count, width, _pitch(part))
            if rank == own and rows.replicated.count:
                first = begin + place + sum(rows.counts) * width
                yield Copy(first, again.data_ptr() + skipped, width, rows.replicated.count, width, _pitch(again))

    received = tuple(
        ((total, heads[own].length, tensor.shape[2]), tensor.dtype)
        for total, (tensor, _, heads) in zip(totals, sides, strict=True)
    )
    return _post(peers, own, (*mine, *kept), sizes, copies, received)


def back(peers: PeerCopies, own: int, sides: Sequence[Side], results: Sequence[Tensor]) -> PeerTransfer | None:
    """Tensors `[T', H', d]` of this rank's heads for those of its tokens, `[n, H, d]` as in `results`, of which
    only the heads of `sides` are written; None where another way is better."""
    if any(_overlap(heads) for _, _, heads in sides) or not _fits(peers, sides):
        return None
    ranks = range(len(sides[0][2]))
    parts = [[_rectangular(rows.of_rank[rank].take(tensor)) for tensor, rows, _ in sides] for rank in ranks]
    pitches = [result.shape[1] * _head(result) for result in results]
    sizes = [
        [rows.of_rank[rank].count * pitch for (_, rows, _), pitch in zip(sides, pitches, strict=True)] for rank in ranks
    ]

    def copies(slots: Slots, slot: int, rank: int) -> Iterator[Copy]:
        begin = slots.addresses[rank] + slots.begin(slot)
        each = zip(sides, parts[rank], pitches, places(sizes[rank]), strict=True)
        for (tensor, rows, heads), part, pitch, place in each:
            first = begin + place + heads[own].start * _head(tensor)
            width, count = heads[own].length * _head(tensor), rows.of_rank[rank].count
            yield Copy(first, part.data_ptr(), width, count, pitch, _pitch(part))

    received = tuple(
        ((rows.of_rank[own].count, *result.shape[1:]), result.dtype)
        for (_, rows, _), result in zip(sides, results, strict=True)
    )
    return _post(peers, own, tuple(part for each in parts for part in each), sizes, copies, received)


def _post(
    peers: PeerCopies,
    own: int,
    sources: Tensors,
    sizes: Sequence[Sequence[int]],
    copies: Copies,
    received: Shapes,
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
        if any(0 < span.length * _head(tensor) < _LEAST_WIDTH for span in heads):
            return False
    return peers.take([tensor for tensor, _, _ in sides])


def _head(tensor: Tensor) -> int:
    """Bytes of one head of a row of `[n, H, d]`."""
    return tensor.shape[2] * tensor.element_size()


def _pitch(tensor: Tensor) -> int:
    """Bytes between two rows' starts."""
    return tensor.stride(0) * tensor.element_size()


def _rectangular(tensor: Tensor) -> Tensor:
    """`[n, H, d]` whose rows lie densely, and apart from one another, as those of an expanded tensor do not; a copy
    where that is not so."""
    rows, heads, dim = tensor.shape
    apart = rows <= 1 or tensor.stride(0) >= heads * dim
    return tensor if apart and tensor.stride(2) == 1 and tensor.stride(1) == dim else tensor.contiguous()


def _overlap(heads: Sequence[Span]) -> bool:
    """Whether some head is several ranks', as a key head is that they share."""
    kept = sorted(span for span in heads if span.length)
    return any(before.stop > after.start for before, after in pairwise(kept))
