"""Tensors written straight into another GPU of the host, by its copy engines.

NCCL's transfers are kernels. An attention kernel that begins first fills every multiprocessor, so that the transfer
waits until it ends, and nothing is hidden (seen on two H200). A copy engine takes no multiprocessor:

```
main stream     attention on k0 ------------------> wait for flag | attention on k1 ---------> free the slot
side stream     wait until the peer's slot is free, copy k0 there, set its flag
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hal_attn.sequence_parallel.driver import Copy, copy, set_flag, wait
from hal_attn.sequence_parallel.slots import SLOTS, Slots, flags_size, mapped, obstacle, rounded

Tensors = tuple[Tensor, ...]
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
RowCounts = tuple[tuple[int, ...], ...]

# Kinds of exchange that are remembered; a model has a few for each batch shape.
_KINDS = 256
_INTERRUPTED = "an exchange was interrupted by an exception"


class Posting(NamedTuple):
    """One exchange of a slot: by rank, what is copied there, and the tensors that come from `sources`, as views."""

    copies: Mapping[int, Sequence[Copy]]
    sources: Sequence[int]
    received: Tensors


class _Move(NamedTuple):
    """Some rows of one tensor: how far from the slot's start they go, and from the tensor's they come, in bytes."""

    tensor: int
    place: int
    passed: int
    size: int


@dataclass(frozen=True)
class _Kind:
    """What exchanges of the same rows have alike, worked out once.

    Attributes:
        moves: by rank, what goes there. sources: who sends here.
        received: shapes and dtypes of what arrives. need: bytes that a slot has at most, on any rank.
    """

    moves: Mapping[int, Sequence[_Move]]
    sources: Sequence[int]
    received: Shapes
    need: int

    @classmethod
    def of(cls, rows: RowCounts, shapes: Shapes, own: int) -> _Kind:
        """`shapes` are those of a row of each tensor."""
        widths = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
        sizes = [[sum(coming) * width for width in widths] for coming in rows]
        moves, passed = {}, 0
        for to, coming in enumerate(rows):
            if coming[own]:
                before = sum(coming[:own])
                each = enumerate(zip(places(sizes[to]), widths, strict=True))
                moves[to] = [_Move(n, at + before * w, passed * w, coming[own] * w) for n, (at, w) in each]
            passed += coming[own]
        sources = [source for source, count in enumerate(rows[own]) if count]
        received = tuple(((sum(rows[own]), *shape), dtype) for shape, dtype in shapes)
        return cls(moves, sources, received, max(sum(map(rounded, each)) for each in sizes))


@dataclass
class PeerCopies:
    """The slots of the ranks of `group`; every rank makes the same exchanges, in the same order.

    `unavailable` is why there are none, once it was tried; None before, and where there are.
    """

    group: dist.ProcessGroup
    unavailable: str | None = None
    _slots: Slots | None = None
    _count: int = 0
    _open: list[PeerTransfer] = field(default_factory=list, repr=False)
    _tried: bool = field(default=False, repr=False)
    _kinds: dict[tuple[RowCounts, Shapes], _Kind] = field(default_factory=dict, repr=False)

    def take(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors can go this way; the first ask on a GPU tries, on all ranks together."""
        device = tensors[0].device
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return False
        if not self._tried:
            self._tried, self.unavailable = True, "the first try was interrupted"
            self.unavailable = obstacle(self.group, device)
        slots = self._slots
        return self.unavailable is None and (slots is None or slots.stream.device == device)

    def send(self, tensors: Tensors, rows: RowCounts) -> PeerTransfer:
        """Start sending `[T, ...]` tensors, `rows[to][this]` rows to each rank of the group, one after another, and
        receiving `rows[this][source]` rows of such tensors from each. Every rank gives the same `rows`."""
        # Only dense memory is copied by an engine; anything else would be copied by a kernel.
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        shapes = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)
        kind = self._kinds.get((rows, shapes))
        if kind is None:
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
            kind = self._kinds[rows, shapes] = _Kind.of(rows, shapes, dist.get_rank(self.group))

        def posting(slots: Slots, slot: int) -> Posting:
            sources, begin = [tensor.data_ptr() for tensor in tensors], slots.begin(slot)
            copies = {
                to: [Copy(slots.addresses[to] + begin + m.place, sources[m.tensor] + m.passed, m.size) for m in moves]
                for to, moves in kind.moves.items()
            }
            return Posting(copies, kind.sources, self.views(slots, slot, kind.received))

        return self.post(tensors, kind.need, posting)

    def views(self, slots: Slots, slot: int, shapes: Shapes) -> Tensors:
        """Tensors of these shapes and dtypes, one after another in an own slot."""
        key = (slot, shapes)
        found: Tensors | None = slots.kept.get(key)
        if found is None:
            if len(slots.kept) >= _KINDS:
                slots.kept.clear()
            begins = places([math.prod(shape) * dtype.itemsize for shape, dtype in shapes])
            found = slots.kept[key] = tuple(
                slots.view(slots.begin(slot) + begin, shape, dtype)
                for begin, (shape, dtype) in zip(begins, shapes, strict=True)
            )
        return found

    def post(self, kept: Tensors, need: int, posting: Callable[[Slots, int], Posting]) -> PeerTransfer:
        """Start an exchange for which a slot has `need` bytes at most, on all ranks alike; `kept` is read by it."""
        try:
            slots = self._room_for(need, kept[0].device)
            self._count += 1
            number, slot, side = self._count, self._count % SLOTS, slots.stream
            posted = posting(slots, slot)
            main = slots.main()
            with slots.here():
                slots.follow(main)
                for to, copies in posted.copies.items():
                    if to != slots.rank and number - SLOTS >= slots.first:
                        wait(side, slots.free(slots.rank, slot, to), number - SLOTS)
                    for each in copies:
                        copy(side, each)
                    if to != slots.rank:
                        set_flag(side, slots.ready(to, slot, slots.rank), number)
                slots.sent[slot].record(side)
        except BaseException:
            self.unavailable = _INTERRUPTED
            raise
        self._open.append(PeerTransfer(self, slots, main, number, posted.sources, kept, posted.received))
        return self._open[-1]

    def close(self, transfer: PeerTransfer) -> bool:
        """Nothing reads or writes its slot any more; whether that is new."""
        if transfer not in self._open:
            return False
        self._open.remove(transfer)
        return True

    def abandon(self) -> None:
        """After an exception: what is under way is ended, each slot freed once its data is there, so that nobody waits
        for this rank; and this way is not taken again, because the ranks may no longer count alike."""
        if self._open:
            self.unavailable = _INTERRUPTED
        for transfer in tuple(self._open):
            transfer.wait()
            transfer.done()

    def _room_for(self, need: int, device: torch.device) -> Slots:
        if self._slots is None or self._slots.room < need:
            # An eighth too much at most, so that batches that grow slowly make new ones seldom.
            step = 1 << max(20, (need - 1).bit_length() - 3)
            room = -(-need // step) * step
            stream = self._slots.stream if self._slots is not None else torch.cuda.Stream(device)
            # The old slots may still be read; making new ones waits for every rank anyway.
            torch.cuda.synchronize(device)
            rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
            memory, handle = mapped(self.group, flags_size(ranks) + SLOTS * room, device, self._count)
            self._slots = Slots(rank, memory, handle, room, self._count + 1, stream)
        return self._slots


@dataclass(eq=False)
class PeerTransfer:
    """Tensors on their way to this rank from `sources`, and others from it, which are `kept` until they are gone; for
    the stream that was the current one, `main`."""

    peers: PeerCopies
    slots: Slots
    main: torch.cuda.Stream
    number: int
    sources: Sequence[int]
    kept: Tensors
    received: Tensors

    def wait(self) -> Tensors:
        """The received tensors, in a slot: read them on the same stream, and say `done`."""
        slots, slot = self.slots, self.number % SLOTS
        with slots.here():
            for source in self.sources:
                wait(self.main, slots.ready(slots.rank, slot, source), self.number)
            self.main.wait_event(slots.sent[slot])
        return self.received

    def abandon(self) -> None:
        """`PeerCopies.abandon` ends all that are under way, this one among them."""
        self.peers.abandon()

    def done(self) -> None:
        """What reads the received tensors was given to the stream: the slot may be written after it."""
        slots = self.slots
        if not self.peers.close(self):
            return
        with slots.here():
            # The side stream may still be sending from the slot, on around the ring.
            slots.follow(self.main)
            for other in range(len(slots.memory)):
                if other != slots.rank:
                    set_flag(slots.stream, slots.free(other, self.number % SLOTS, slots.rank), self.number)


def places(sizes: Sequence[int]) -> list[int]:
    """Where tensors of these sizes in bytes begin, one after another in a slot."""
    return list(accumulate(map(rounded, sizes[:-1]), initial=0))
