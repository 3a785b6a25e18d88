"""How keys reach the queries: hop by hop in a ring, or at once from all who hold what is seen.

```
ring, 4 ranks, keys travel          rank 0    rank 1    rank 2    rank 3
hop 0  compute on                     k0        k1        k2        k3      while hop 1 travels
hop 1                                 k3        k0        k1        k2      while hop 2 travels
hop 3 (2 is seen by nobody)           k1        k2        k3        k0      sent on by two places
```

Keys and values travel as they are, one collective each: joining them first would read and write them once more. An
exchange hands the tensors of each hop to a function as they arrive; the next ones travel while that function works.
Backward, gradients (float32) come home to the owner of the keys.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hal_attn.sequence_parallel.peers import PeerCopies, Tensors
from hal_attn.sequence_parallel.work import RowSet

Consume = Callable[[int, Tensors], None]
Contribute = Callable[[int, Tensors], Tensor]


class Transfer(Protocol):
    """Tensors on their way."""

    def wait(self) -> Tensors:
        """They are there, for what the current stream is given from now on."""

    def done(self) -> None:
        """What reads them was given to the current stream."""

    def abandon(self) -> None:
        """Nothing will read them, after an exception."""


@dataclass(frozen=True)
class _Transfer:
    """By collectives; `sent` is kept until it is gone."""

    received: Tensors
    works: Sequence[dist.Work]
    sent: Tensors

    def wait(self) -> Tensors:
        for work in self.works:
            work.wait()
        return self.received

    def done(self) -> None:
        """The tensors are nobody else's."""

    def abandon(self) -> None:
        self.wait()


_NOTHING = _Transfer((), (), ())


@contextmanager
def _ending(*transfers: Transfer) -> Iterator[None]:
    """Where what is within raises, the transfers under way end first, so that nobody waits for them for ever."""
    try:
        yield
    except BaseException:
        for transfer in transfers:
            transfer.abandon()
        raise


class Exchange(ABC):
    """Moves tensors `[T, ...]`, the rows of one plan's keys, among the ranks of its exchange group."""

    @abstractmethod
    def forward(self, own: Tensors, consume: Consume) -> None:
        """`consume(hop, tensors)` for each hop, 0 being `own`."""

    @abstractmethod
    def backward(self, own: Tensors, contribute: Contribute) -> Tensor:
        """The gradient of `own`, float32: the sum, over all ranks, of what `contribute(hop, tensors)` gives for it."""


class NoExchange(Exchange):
    """One rank, which holds every key."""

    def forward(self, own: Tensors, consume: Consume) -> None:
        consume(0, own)

    def backward(self, own: Tensors, contribute: Contribute) -> Tensor:
        return contribute(0, own)


@dataclass(frozen=True)
class RingExchange(Exchange):
    """Around the ring, double buffered. Each hop is a collective in which a rank sends to one other and hears from one,
    which is one call on the host where operations between two are several.

    Attributes:
        coordinate: this rank's place in the ring, as in the group.
        hops: how far the keys have come at each hop, from 0; hops that nobody needs are not among them.
        rows: rows of each coordinate's keys.
        peers: the quicker way for keys, where there is one.
    """

    group: dist.ProcessGroup
    coordinate: int
    hops: tuple[int, ...]
    rows: tuple[int, ...]
    peers: PeerCopies | None = None

    def forward(self, own: Tensors, consume: Consume) -> None:
        held = own
        arrived: Transfer = _NOTHING
        for index in range(len(self.hops)):
            sent: Transfer = self._send_keys(held, index) if index + 1 < len(self.hops) else _NOTHING
            with _ending(arrived, sent):
                consume(index, held)
            arrived.done()
            held, arrived = sent.wait(), sent

    def backward(self, own: Tensors, contribute: Contribute) -> Tensor:
        held = own
        arriving: _Transfer | None = None
        for index in range(len(self.hops)):
            sent = self._send_on(held, index) if index + 1 < len(self.hops) else None
            gradient = contribute(index, held)
            if arriving is not None:
                gradient = gradient + arriving.wait()[0]
            if index == len(self.hops) - 1:
                return self._transfer((gradient,), -self.hops[index], self.coordinate).wait()[0]
            arriving = self._send_on((gradient,), index)
            assert sent is not None
            held = sent.wait()
        raise AssertionError("a ring has at least one hop")

    def source(self, index: int) -> int:
        """Whose keys this rank holds at that hop."""
        return (self.coordinate - self.hops[index]) % len(self.rows)

    def _send_keys(self, held: Tensors, index: int) -> Transfer:
        places, source = self.hops[index + 1] - self.hops[index], self.source(index + 1)
        if self.peers is not None and self.peers.take(held):
            to = (self.coordinate + places) % len(self.rows)
            return self.peers.send(held, to, self.rows[source], max(self.rows))
        return self._send_on(held, index)

    def _send_on(self, held: Tensors, index: int) -> _Transfer:
        return self._transfer(held, self.hops[index + 1] - self.hops[index], self.source(index + 1))

    def _transfer(self, held: Tensors, places: int, source: int) -> _Transfer:
        """Send `held` on by `places`, and receive what comes by as many, the tensors of coordinate `source`."""
        size = len(self.rows)
        if places % size == 0:
            return _Transfer(held, [], held)
        sends, receives = [0] * size, [0] * size
        sends[(self.coordinate + places) % size] = held[0].shape[0]
        receives[(self.coordinate - places) % size] = self.rows[source]
        return _all_to_all(self.group, held, sends, receives)


@dataclass(frozen=True)
class GatherExchange(Exchange):
    """All that the local queries can see, from all ranks at once.

    Attributes:
        sends: by coordinate, which own rows it sees; `receives`, how many rows of it are seen here. Own: none.
        peers: the quicker way for keys between two ranks, where there is one.
    """

    group: dist.ProcessGroup
    sends: tuple[RowSet, ...]
    receives: tuple[int, ...]
    peers: PeerCopies | None = None

    def forward(self, own: Tensors, consume: Consume) -> None:
        sent = self._send_keys(own)
        with _ending(sent):
            consume(0, own)
            consume(1, sent.wait())
        sent.done()

    def backward(self, own: Tensors, contribute: Contribute) -> Tensor:
        sent = self._gather(own)
        gradient = contribute(0, own)
        others = contribute(1, sent.wait())
        counts = [rows.count for rows in self.sends]
        home = _all_to_all(self.group, (others,), self.receives, counts).wait()[0]
        for rows, part in zip(self.sends, home.split(counts), strict=True):
            rows.add(gradient, part)
        return gradient

    def _send_keys(self, own: Tensors) -> Transfer:
        # A slot has room for the keys of one rank.
        if self.peers is not None and len(self.sends) == 2 and self.peers.take(own):
            to = 1 - dist.get_rank(self.group)
            keys = tuple(self.sends[to].take(tensor) for tensor in own)
            rows = self.receives[to]
            return self.peers.send(keys, to, rows, max(rows, self.sends[to].count))
        return self._gather(own)

    def _gather(self, own: Tensors) -> _Transfer:
        parts = tuple(_joined([rows.take(tensor) for rows in self.sends if rows.count], tensor) for tensor in own)
        return _all_to_all(self.group, parts, [rows.count for rows in self.sends], self.receives)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """`torch.cat`, which would also copy a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else like[:0]


def _all_to_all(group: dist.ProcessGroup, tensors: Tensors, sends: Sequence[int], receives: Sequence[int]) -> _Transfer:
    """Rows `[sum(sends), ...]` of each tensor, by destination, for rows `[sum(receives), ...]`, by source."""
    received, works, sent = [], [], []
    for tensor in tensors:
        incoming = tensor.new_empty(sum(receives), *tensor.shape[1:])
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        size = math.prod(tensor.shape[1:]) * tensor.element_size()
        # Bytes: a process group need not know the dtype of what it moves.
        work = dist.all_to_all_single(
            incoming.view(-1).view(torch.uint8),
            flat,
            [count * size for count in receives],
            [count * size for count in sends],
            group=group,
            async_op=True,
        )
        received.append(incoming)
        works.append(work)
        sent.append(flat)
    return _Transfer(tuple(received), works, tuple(sent))
