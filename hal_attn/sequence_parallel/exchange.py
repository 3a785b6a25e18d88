"""How keys reach the queries: hop by hop in a ring, or at once from all who hold what is seen.

```
ring, 4 ranks, keys travel          rank 0    rank 1    rank 2    rank 3
hop 0  compute on                     k0        k1        k2        k3      while hop 1 travels
hop 1                                 k3        k0        k1        k2      while hop 2 travels
hop 3 (2 is seen by nobody)           k1        k2        k3        k0      sent on by two places
```

Keys and values travel as they are, one collective each: joining them first would read and write them once more. An
exchange hands the tensors of each hop to a function as they arrive; the next ones travel while that function works.

Backward, keys travel so again, and their gradients come home to the owner, whose own part waits for them there. What
goes straight home is one rank's part, rounded as a kernel gives it: the owner adds it up. In a ring of more hops each
rank adds its part to what comes along, in float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hal_attn.guard import attempt
from hal_attn.sequence_parallel.peers import PeerCopies, RowCounts, Tensors
from hal_attn.sequence_parallel.work import RowSet

Consume = Callable[[int, Tensors], None]
Contribute = Callable[[int, Tensors], Tensors]
Receive = Callable[[RowSet, Tensors], None]


class Abandoned(Protocol):
    """What is under way and may not be left so."""

    def abandon(self) -> None:
        """Nothing will read it, after an exception."""


class Transfer(Abandoned, Protocol):
    """Tensors on their way."""

    def wait(self) -> Tensors:
        """They are there, for what the current stream is given from now on."""

    def done(self) -> None:
        """What reads them was given to the current stream."""


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


_NOTHING: Transfer = _Transfer((), (), ())


class Ending:
    """Where what is within raises, what is under way ends first, so that nobody waits for it for ever."""

    def __init__(self, *transfers: Abandoned) -> None:
        self._transfers = transfers

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            for transfer in self._transfers:
                attempt(transfer.abandon, None)


class Exchange(ABC):
    """Moves key and value `[T, ...]` of one plan among the ranks of its exchange group.

    Attributes:
        coming: how many parts of a key's gradient come home at most.
        straight: each part comes home by itself.
        peers: the quicker way, where there is one.
    """

    peers: PeerCopies | None = None

    @property
    @abstractmethod
    def coming(self) -> int: ...

    @property
    def straight(self) -> bool:
        return True

    @abstractmethod
    def forward(self, keys: Tensors, consume: Consume) -> None:
        """`consume(hop, tensors)` for each hop; hop 0 has `keys`, all that are here, and the others what arrived."""

    @abstractmethod
    def backward(self, keys: Tensors, contribute: Contribute, receive: Receive) -> None:
        """`contribute(hop, tensors)` for each hop gives their gradients by what is here, in a dtype that all ranks have
        alike, float32 where not `straight`. Those of hop 0 stay; what comes home from others goes to `receive(rows,
        gradients)`, after hop 0, and must not be kept."""


class NoExchange(Exchange):
    """Each rank holds every key that it needs."""

    coming = 0

    def forward(self, keys: Tensors, consume: Consume) -> None:
        consume(0, keys)

    def backward(self, keys: Tensors, contribute: Contribute, receive: Receive) -> None:
        contribute(0, keys)


@dataclass(frozen=True)
class RingExchange(Exchange):
    """Around the ring, double buffered. Each hop is a collective in which a rank sends to one other and hears from one,
    which is one call on the host where operations between two are several.

    Attributes:
        coordinate: this rank's place in the ring, as in the group.
        hops: how far the keys have come at each hop, from 0; hops that nobody needs are not among them.
        rows: rows of each coordinate's keys that travel; `own`, which of the keys here do.
        peers: the quicker way for keys, and for gradients that go `straight` home, where there is one.
    """

    group: dist.ProcessGroup
    coordinate: int
    hops: tuple[int, ...]
    rows: tuple[int, ...]
    own: RowSet
    peers: PeerCopies | None = None

    @property
    def coming(self) -> int:
        return min(1, len(self.hops) - 1)

    @property
    def straight(self) -> bool:
        return len(self.hops) <= 2

    def forward(self, keys: Tensors, consume: Consume) -> None:
        held, arrived = keys, _NOTHING
        for index in range(len(self.hops)):
            sent = self._send_keys(held, index)
            with Ending(arrived, sent):
                consume(index, held)
            arrived.done()
            held, arrived = sent.wait(), sent

    def backward(self, keys: Tensors, contribute: Contribute, receive: Receive) -> None:
        held, arrived, gradients = keys, _NOTHING, _NOTHING
        for index in range(len(self.hops)):
            sent = self._send_keys(held, index)
            with Ending(arrived, sent, gradients):
                parts = contribute(index, held)
            arrived.done()
            if index > 1:
                parts = tuple(part + before for part, before in zip(parts, gradients.wait(), strict=True))
            if index:
                gradients = self._send_gradients(parts, index)
            held, arrived = sent.wait(), sent
        if len(self.hops) > 1:
            receive(self.own, gradients.wait())
            gradients.done()

    def source(self, index: int) -> int:
        """Whose keys this rank holds at that hop."""
        return (self.coordinate - self.hops[index]) % len(self.rows)

    def _send_keys(self, held: Tensors, index: int) -> Transfer:
        """On from a hop those that go on; from the last one none."""
        if index + 1 == len(self.hops):
            return _NOTHING
        if index == 0 and not self.own.all:
            held = tuple(self.own.take(tensor) for tensor in held)
        places = self.hops[index + 1] - self.hops[index]
        return self._transfer(held, places, self.source(index + 1), self.peers)

    def _send_gradients(self, parts: Tensors, index: int) -> Transfer:
        """On with their keys, and from the last hop home."""
        if index + 1 < len(self.hops):
            places, source = self.hops[index + 1] - self.hops[index], self.source(index + 1)
        else:
            places, source = -self.hops[index], self.coordinate
        # Two slots are for one transfer at a time and its reader, and a slot has no room for float32.
        return self._transfer(parts, places, source, self.peers if self.straight else None)

    def _transfer(self, held: Tensors, places: int, source: int, peers: PeerCopies | None) -> Transfer:
        """Send `held` on by `places`, and receive what comes by as many, the tensors of coordinate `source`."""
        size = len(self.rows)
        if peers is not None and peers.take(held):
            hops = (self.coordinate - source) % size
            key = (places % size, hops)
            if key not in self._moves:
                self._moves[key] = self._moved(*key)
            return peers.send(held, self._moves[key])
        sends, receives = [0] * size, [0] * size
        sends[(self.coordinate + places) % size] = held[0].shape[0]
        receives[(self.coordinate - places) % size] = self.rows[source]
        return _all_to_all(self.group, held, sends, receives)

    @cached_property
    def _moves(self) -> dict[tuple[int, int], RowCounts]:
        return {}

    def _moved(self, places: int, hops: int) -> RowCounts:
        """`[reader][source]`, rows that move on by `places` and are then `hops` from their owner."""
        size = len(self.rows)
        rows = [[0] * size for _ in range(size)]
        for reader, coming in enumerate(rows):
            coming[(reader - places) % size] = self.rows[(reader - hops) % size]
        return tuple(map(tuple, rows))


@dataclass(frozen=True)
class GatherExchange(Exchange):
    """All that the local queries can see, from all ranks at once.

    Attributes:
        coordinate: this rank's place, as in the group.
        sends: by coordinate, which keys here it sees. Own: none.
        rows: `[reader][source]`, how many rows of a source each reader sees; `receives`, here.
        peers: the quicker way, where there is one.
    """

    group: dist.ProcessGroup
    coordinate: int
    sends: tuple[RowSet, ...]
    rows: tuple[tuple[int, ...], ...]
    peers: PeerCopies | None = None

    @property
    def coming(self) -> int:
        return sum(rows.count > 0 for rows in self.sends)

    @property
    def receives(self) -> tuple[int, ...]:
        return self.rows[self.coordinate]

    def forward(self, keys: Tensors, consume: Consume) -> None:
        sent = self._gather(keys)
        with Ending(sent):
            consume(0, keys)
            consume(1, sent.wait())
        sent.done()

    def backward(self, keys: Tensors, contribute: Contribute, receive: Receive) -> None:
        sent = self._gather(keys)
        with Ending(sent):
            contribute(0, keys)
            parts = contribute(1, sent.wait())
        sent.done()
        counts = [rows.count for rows in self.sends]
        gradients = self._exchanged(parts, tuple(zip(*self.rows, strict=True)))
        arrived = gradients.wait()
        for rows, *part in zip(self.sends, *(tensor.split(counts) for tensor in arrived), strict=True):
            if rows.count:
                receive(rows, tuple(part))
        gradients.done()

    def _gather(self, keys: Tensors) -> Transfer:
        parts = tuple(_joined([rows.take(tensor) for rows in self.sends if rows.count], tensor) for tensor in keys)
        return self._exchanged(parts, self.rows)

    def _exchanged(self, tensors: Tensors, rows: RowCounts) -> Transfer:
        """Rows of `tensors` by destination, for rows by source; `rows` `[reader][source]`."""
        if self.peers is not None and self.peers.take(tensors):
            return self.peers.send(tensors, rows)
        sends = [coming[self.coordinate] for coming in rows]
        return _all_to_all(self.group, tensors, sends, rows[self.coordinate])


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
