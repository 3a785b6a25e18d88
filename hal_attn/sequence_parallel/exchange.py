"""How keys reach the queries: hop by hop in a ring, or at once from all who hold what is seen.

```
ring, 4 ranks, keys travel          rank 0    rank 1    rank 2    rank 3
hop 0  compute on                     k0        k1        k2        k3      while hop 1 travels
hop 1                                 k3        k0        k1        k2      while hop 2 travels
hop 3 (2 is seen by nobody)           k1        k2        k3        k0      sent on by two places
```

Keys and values of a hop are one buffer `[T, Hkv, D + Dv]`. An exchange hands each buffer to a function as it arrives;
the next one travels while that function works. Backward, gradients of a buffer (float32) come home to its owner.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hal_attn.sequence_parallel.work import RowSet

Consume = Callable[[int, Tensor], None]
Contribute = Callable[[int, Tensor], Tensor]


class Exchange(ABC):
    """Moves the buffers of one plan among the ranks of its exchange group."""

    @abstractmethod
    def forward(self, own: Tensor, consume: Consume) -> None:
        """`consume(hop, buffer)` for each hop, 0 being `own`."""

    @abstractmethod
    def backward(self, own: Tensor, contribute: Contribute) -> Tensor:
        """The gradient of `own`, float32: the sum, over all ranks, of what `contribute(hop, buffer)` gives for it."""


class NoExchange(Exchange):
    """One rank, which holds every key."""

    def forward(self, own: Tensor, consume: Consume) -> None:
        consume(0, own)

    def backward(self, own: Tensor, contribute: Contribute) -> Tensor:
        return contribute(0, own)


@dataclass(frozen=True)
class RingExchange(Exchange):
    """Point to point around the ring, double buffered.

    Attributes:
        ranks: global rank of each ring coordinate; `coordinate` is this rank's.
        hops: how far the keys have come at each hop, from 0; hops that nobody needs are not among them.
        rows: rows of each coordinate's buffer.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    coordinate: int
    hops: tuple[int, ...]
    rows: tuple[int, ...]

    def forward(self, own: Tensor, consume: Consume) -> None:
        held = own
        for index in range(len(self.hops)):
            sent = self._send_on(held, index) if index + 1 < len(self.hops) else None
            consume(index, held)
            if sent is not None:
                held = sent.wait()

    def backward(self, own: Tensor, contribute: Contribute) -> Tensor:
        held = own
        arriving: _Transfer | None = None
        for index in range(len(self.hops)):
            sent = self._send_on(held, index) if index + 1 < len(self.hops) else None
            gradient = contribute(index, held)
            if arriving is not None:
                gradient = gradient + arriving.wait()
            if index == len(self.hops) - 1:
                return self._transfer(gradient, -self.hops[index], self.coordinate).wait()
            arriving = self._send_on(gradient, index)
            assert sent is not None
            held = sent.wait()
        raise AssertionError("a ring has at least one hop")

    def source(self, index: int) -> int:
        """Whose keys this rank holds at that hop."""
        return (self.coordinate - self.hops[index]) % len(self.ranks)

    def _send_on(self, held: Tensor, index: int) -> _Transfer:
        return self._transfer(held, self.hops[index + 1] - self.hops[index], self.source(index + 1))

    def _transfer(self, held: Tensor, places: int, source: int) -> _Transfer:
        """Send `held` on by `places`, and receive what comes by as many, the buffer of coordinate `source`."""
        if places % len(self.ranks) == 0:
            return _Transfer(held, [], held)
        received = held.new_empty(self.rows[source], *held.shape[1:])
        held = held.contiguous()
        to, by = (self.ranks[(self.coordinate + step) % len(self.ranks)] for step in (places, -places))
        operations = []
        if held.numel():
            operations.append(dist.P2POp(dist.isend, held, to, self.group))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, by, self.group))
        return _Transfer(received, dist.batch_isend_irecv(operations) if operations else [], held)


@dataclass(frozen=True)
class _Transfer:
    """A buffer on its way; `sent` is kept until it is gone."""

    received: Tensor
    works: Sequence[dist.Work]
    sent: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class GatherExchange(Exchange):
    """All that the local queries can see, from all ranks at once.

    Attributes:
        sends: by coordinate, which own rows it sees; `receives`, how many rows of it are seen here. Own: none.
    """

    group: dist.ProcessGroup
    sends: tuple[RowSet, ...]
    receives: tuple[int, ...]

    def forward(self, own: Tensor, consume: Consume) -> None:
        sent = self._gather(own)
        consume(0, own)
        consume(1, sent.wait())

    def backward(self, own: Tensor, contribute: Contribute) -> Tensor:
        sent = self._gather(own)
        gradient = contribute(0, own)
        others = contribute(1, sent.wait())
        home = _all_to_all(self.group, others, self.receives, [rows.count for rows in self.sends]).wait()
        for rows, part in zip(self.sends, home.split([rows.count for rows in self.sends]), strict=True):
            rows.add(gradient, part)
        return gradient

    def _gather(self, own: Tensor) -> _Transfer:
        parts = torch.cat([rows.take(own) for rows in self.sends])
        return _all_to_all(self.group, parts, [rows.count for rows in self.sends], self.receives)


def _all_to_all(group: dist.ProcessGroup, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> _Transfer:
    """Rows `[sum(sends), ...]`, by destination, for rows `[sum(receives), ...]`, by source."""
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    flat = rows.contiguous().view(-1).view(torch.uint8)
    size = math.prod(rows.shape[1:]) * rows.element_size()
    # Bytes: a process group need not know the dtype of what it moves.
    work = dist.all_to_all_single(
        received.view(-1).view(torch.uint8),
        flat,
        [count * size for count in receives],
        [count * size for count in sends],
        group=group,
        async_op=True,
    )
    return _Transfer(received, [work], flat)
