"""The exchange of heads: tokens of some heads for heads of some tokens, and back, one collective each way.

```
before: rank u holds its tokens, all heads          after: rank u holds all tokens of the ring coordinate, its heads
rank 0   t0 | h0 h1 h2 h3                           rank 0   t0 t1 | h0 h1
rank 1   t1 | h0 h1 h2 h3                           rank 1   t0 t1 | h2 h3
```

Replicated tokens are on every rank before, so each takes its heads of them and nothing is sent; on the way back every
rank gets all heads of them. So the way back is the gradient of the way there, and the other way round: what stands for
one replicated token is the same on all ranks, and counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hal_attn.sequence_parallel import peer_heads
from hal_attn.sequence_parallel.peers import PeerCopies, PeerTransfer
from hal_attn.sequence_parallel.sharding import Rows
from hal_attn.sequence_parallel.spans import Span
from hal_attn.sequence_parallel.work import RowSet

_ALIGNMENT = 16


@dataclass(frozen=True)
class SideRows:
    """Rows of queries, or of keys, on both sides of an exchange.

    Attributes:
        own, replicated: rows of the local tensor; `total` of them in all.
        counts: own rows of each rank.
        arrange: rows of (all ranks' own rows, replicated rows), one after another, in the chunk's order.
        of_rank: by rank, the chunk's rows that it holds: own, then replicated.
    """

    own: RowSet
    replicated: RowSet
    total: int
    counts: tuple[int, ...]
    arrange: RowSet
    of_rank: tuple[RowSet, ...]

    @classmethod
    def of(cls, locals_: Sequence[Rows], chunk: Rows, coordinate: int) -> SideRows:
        """From each rank's rows before the exchange and the rows after it."""
        here = locals_[coordinate]
        place = torch.empty(sum(chunk.lengths), dtype=torch.int64)
        place[chunk.tokens] = torch.arange(chunk.count)
        owned = [place[rows.tokens[rows.own]] for rows in locals_]
        replicated = place[here.tokens[here.replicated]]
        arrange = torch.empty(chunk.count, dtype=torch.int64)
        arrange[torch.cat([*owned, replicated])] = torch.arange(chunk.count)
        return cls(
            RowSet.of_index(here.own, here.count),
            RowSet.of_index(here.replicated, here.count),
            here.count,
            tuple(rows.numel() for rows in owned),
            RowSet.of_index(arrange, chunk.count),
            tuple(RowSet.of_index(torch.cat([rows, replicated]), chunk.count) for rows in owned),
        )


Side = tuple[Tensor, SideRows, Sequence[Span]]


@dataclass(frozen=True)
class HeadExchange:
    """The exchange among the `ulysses` ranks of one group; this rank's place among them is `coordinate`, and `peers`
    the quicker way, where there is one."""

    group: dist.ProcessGroup
    coordinate: int
    peers: PeerCopies | None = None

    def there(self, sides: Sequence[Side], *, keep: bool) -> Arriving:
        """Each `[T, H, d]` tensor of a rank's tokens, with the heads that every rank takes -> `[T', H', d]` of this
        rank's heads, in the chunk's order; to `keep`, or to be read before `done`."""
        sent = None if self.peers is None else peer_heads.there(self.peers, self.coordinate, sides)
        if sent is not None:
            return _from_slot(sent, sides, keep)
        outgoing = [
            [rows.own.take(tensor)[:, slice(*heads[rank])] for tensor, rows, heads in sides]
            for rank in range(len(sides[0][2]))
        ]
        shapes = [
            [(rows.counts[rank], heads[self.coordinate].length, tensor.shape[2]) for tensor, rows, heads in sides]
            for rank in range(len(sides[0][2]))
        ]
        arriving = self._exchange(outgoing, shapes)

        def arranged() -> list[Tensor]:
            received = arriving.blocks()
            results = []
            for index, (tensor, rows, heads) in enumerate(sides):
                kept = rows.replicated.take(tensor)[:, slice(*heads[self.coordinate])]
                parts = torch.cat([*(blocks[index] for blocks in received), kept])
                results.append(rows.arrange.take(parts))
            return results

        return Arriving(arranged)

    def back(self, sides: Sequence[Side], results: Sequence[Tensor], *, add: bool) -> Arriving:
        """Each `[T', H', d]` tensor of this rank's heads to `results` `[T, H, d]` of its tokens: all heads, each from
        the rank that holds it, or with `add` added to what is there from all ranks that do."""
        sent = None if self.peers is None else peer_heads.back(self.peers, self.coordinate, sides, results)
        if sent is not None:
            return _to_results(sent, sides, results)
        outgoing = [[rows.of_rank[rank].take(tensor) for tensor, rows, _ in sides] for rank in range(len(sides[0][2]))]
        shapes = [
            [
                (rows.of_rank[self.coordinate].count, heads[rank].length, tensor.shape[2])
                for tensor, rows, heads in sides
            ]
            for rank in range(len(sides[0][2]))
        ]
        arriving = self._exchange(outgoing, shapes)

        def arranged() -> list[Tensor]:
            received = arriving.blocks()
            for index, ((_, rows, heads), result) in enumerate(zip(sides, results, strict=True)):
                for rank, blocks in enumerate(received):
                    _write(result[:, slice(*heads[rank])], rows, blocks[index], add)
            return list(results)

        return Arriving(arranged)

    def _exchange(self, outgoing: list[list[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> _Bytes:
        """By rank, tensors that go there, for tensors of these shapes from there; this rank's own stay as they are."""
        own, dtypes = self.coordinate, [tensor.dtype for tensor in outgoing[0]]
        leaving = [[] if rank == own else tensors for rank, tensors in enumerate(outgoing)]
        sends = [sum(padded_size(tensor.numel() * tensor.element_size()) for tensor in rank) for rank in leaving]
        receives = [
            sum(padded_size(math.prod(shape) * dtype.itemsize) for shape, dtype in zip(rank, dtypes, strict=True))
            for rank in shapes
        ]
        receives[own] = 0
        device = outgoing[own][0].device
        sent, received = (torch.empty(sum(sizes), dtype=torch.uint8, device=device) for sizes in (sends, receives))
        begin = 0
        for tensor in (tensor for rank in leaving for tensor in rank):
            size = tensor.numel() * tensor.element_size()
            sent[begin : begin + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            begin += padded_size(size)
        work = dist.all_to_all_single(received, sent, receives, sends, group=self.group, async_op=True)
        return _Bytes(received, receives, shapes, dtypes, work, sent, own, outgoing[own])


def _from_slot(sent: PeerTransfer, sides: Sequence[Side], keep: bool) -> Arriving:
    def arranged() -> list[Tensor]:
        found = []
        for tensor, (_, rows, _) in zip(sent.wait(), sides, strict=True):
            in_order = rows.arrange.take(tensor)
            found.append(in_order.clone() if keep and rows.arrange.index is None else in_order)
        if keep:
            sent.done()
        return found

    return Arriving(arranged, sent)


def _to_results(sent: PeerTransfer, sides: Sequence[Side], results: Sequence[Tensor]) -> Arriving:
    def arranged() -> list[Tensor]:
        for block, (_, rows, heads), result in zip(sent.wait(), sides, results, strict=True):
            for span in heads:
                _write(result[:, slice(*span)], rows, block[:, slice(*span)], add=False)
        sent.done()
        return list(results)

    return Arriving(arranged, sent)


def _write(target: Tensor, rows: SideRows, part: Tensor, add: bool) -> None:
    """`part` `[n, h, d]`, own rows and then replicated ones, to their places in `target` `[T, h, d]`."""
    own, replicated = part.split([rows.own.count, rows.replicated.count])
    for places, values in ((rows.own, own), (rows.replicated, replicated)):
        if places.count:
            (places.add if add else places.put)(target, values)


@dataclass(frozen=True)
class Arriving:
    """Tensors on their way; `wait` gives them, arrived and in order. `sent`: they are in a slot until `done`."""

    wait: Callable[[], list[Tensor]]
    sent: PeerTransfer | None = None

    def done(self) -> None:
        """What reads them was given to the current stream."""
        if self.sent is not None:
            self.sent.done()


@dataclass(frozen=True)
class _Bytes:
    received: Tensor
    sizes: list[int]
    shapes: Sequence[Sequence[tuple[int, ...]]]
    dtypes: list[torch.dtype]
    work: dist.Work
    sent: Tensor
    own: int
    kept: list[Tensor]

    def blocks(self) -> list[list[Tensor]]:
        """By rank, the tensors that it sent, this rank's own among them."""
        self.work.wait()
        blocks = zip(self.received.split(self.sizes), self.shapes, strict=True)
        return [self.kept if rank == self.own else self._block(*block) for rank, block in enumerate(blocks)]

    def _block(self, block: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        tensors: list[Tensor] = []
        begin = 0
        for shape, dtype in zip(shapes, self.dtypes, strict=True):
            size = math.prod(shape) * dtype.itemsize
            tensors.append(block[begin : begin + size].view(dtype).view(shape))
            begin += padded_size(size)
        return tensors


def padded_size(size: int) -> int:
    """Room for `size` bytes, up to the next multiple of the alignment, so that a view of any dtype may begin after."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
