"""Keys written straight into another GPU of the host, by its copy engines.

NCCL's transfers are kernels. An attention kernel that begins first fills every multiprocessor, so that the transfer
waits until it ends, and nothing is hidden (seen on two H200). A copy engine takes no multiprocessor:

```
main stream     attention on k0 ------------------> wait for flag | attention on k1 ---------> free the slot
side stream     wait until the peer's slot is free, copy k0 there, raise its flag
```

Each rank has two slots in memory that its peers map, and flags beside them; the streams wait for flags and raise them
without a kernel. A slot is written again only after its reader freed it.
"""

from __future__ import annotations

import ctypes
import math
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hal_attn.guard import attempt
from hal_attn.sequence_parallel.current import current

Tensors = tuple[Tensor, ...]

_SLOTS = 2
_ALIGNMENT = 256
# Kinds of exchange that are remembered; a model has a few for each batch shape.
_KINDS = 256


@dataclass(frozen=True)
class _Route:
    """One kind of exchange: where it writes and where it is read, by slot.

    Attributes:
        sizes: bytes of each tensor; `targets`, the addresses that they are copied to.
        received: the tensors of other ranks, as views of the own slot.
    """

    sizes: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]
    received: tuple[Tensors, ...]


@dataclass
class _Opened:
    """What the ranks made together.

    Attributes:
        rank: this one in the group.
        memory: by rank, its flags and slots as this rank maps them, uint8; `handle` keeps them mapped.
        room: bytes of a slot.
        first: the number of the first exchange that used it.
        stream: the side stream; `passing` is what it waits for, `sent`, by slot, what waits for it.
    """

    rank: int
    memory: list[Tensor]
    handle: Any
    room: int
    first: int
    stream: torch.cuda.Stream
    passing: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    sent: list[torch.cuda.Event] = field(default_factory=lambda: [torch.cuda.Event() for _ in range(_SLOTS)])
    routes: dict[object, _Route] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.addresses = [memory.data_ptr() for memory in self.memory]

    def here(self) -> AbstractContextManager[Any]:
        """Its GPU as the current one: the default stream has one handle on all of them, which means that of the
        current one."""
        return current(self.stream.device)

    def main(self) -> torch.cuda.Stream:
        """The current stream of its GPU."""
        return torch.cuda.current_stream(self.stream.device)

    def follow(self, main: torch.cuda.Stream) -> None:
        """The side stream goes on after what `main` was given so far."""
        self.passing.record(main)
        self.stream.wait_event(self.passing)

    def flag(self, owner: int, name: str, slot: int, rank: int = 0) -> int:
        """The address of a flag, in the memory of who waits for it: "ready" of an own slot, or "free" of one of
        `rank`."""
        place = slot if name == "ready" else _SLOTS * (1 + rank) + slot
        return self.addresses[owner] + 4 * place

    def route(self, tensors: Tensors, to: int, rows: int) -> _Route:
        """Of these tensors to rank `to`, and `rows` rows of such from another."""
        key = (to, rows, *((tensor.shape, tensor.dtype) for tensor in tensors))
        found = self.routes.get(key)
        if found is None:
            if len(self.routes) >= _KINDS:
                self.routes.clear()
            found = self.routes[key] = self._route(tensors, to, rows)
        return found

    def _route(self, tensors: Tensors, to: int, rows: int) -> _Route:
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        shapes = [(rows, *tensor.shape[1:]) for tensor in tensors]
        incoming = [math.prod(shape) * tensor.element_size() for shape, tensor in zip(shapes, tensors, strict=True)]
        targets, received = [], []
        for slot in range(_SLOTS):
            targets.append(tuple(self.addresses[to] + place for place in self._places(slot, sizes)))
            views = [
                self.memory[self.rank][place : place + size].view(tensor.dtype).view(shape)
                for place, size, tensor, shape in zip(
                    self._places(slot, incoming), incoming, tensors, shapes, strict=True
                )
            ]
            received.append(tuple(views))
        return _Route(tuple(sizes), tuple(targets), tuple(received))

    def _places(self, slot: int, sizes: Sequence[int]) -> list[int]:
        """Where tensors of these sizes begin, one after another in a slot, from the start of the memory."""
        begin = _flags_size(len(self.memory)) + slot * self.room
        return [begin + before for before in accumulate(map(_rounded, sizes[:-1]), initial=0)]


@dataclass
class PeerCopies:
    """The slots of the ranks of `group`; every rank makes the same exchanges, in the same order.

    `unavailable` is why there are none, once it was tried; None before, and where there are.
    """

    group: dist.ProcessGroup
    unavailable: str | None = None
    _opened: _Opened | None = None
    _count: int = 0
    _tried: bool = field(default=False, repr=False)

    def take(self, tensors: Tensors) -> bool:
        """Whether these tensors can go this way; the first ask on a GPU tries, on all ranks together."""
        device = tensors[0].device
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return False
        if not self._tried:
            self._tried, self.unavailable = True, "the first try was interrupted"
            self.unavailable = _obstacle(self.group, device)
        opened = self._opened
        return self.unavailable is None and (opened is None or opened.stream.device == device)

    def send(self, tensors: Tensors, to: int, rows: int, most_rows: int) -> PeerTransfer:
        """Start sending `[T, ...]` tensors to rank `to` of the group, and receiving `rows` rows of such from another.

        `most_rows`: of any rank in this exchange; no rank sends or receives more.
        """
        # Only dense memory is copied by an engine; anything else would be copied by a kernel.
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        opened = self._room_for(tensors, most_rows)
        self._count += 1
        number, slot, side = self._count, self._count % _SLOTS, opened.stream
        route = opened.route(tensors, to, rows)
        with opened.here():
            opened.follow(opened.main())
            if number - _SLOTS >= opened.first:
                _wait(side, opened.flag(opened.rank, "free", slot, to), number - _SLOTS)
            for target, tensor, size in zip(route.targets[slot], tensors, route.sizes, strict=True):
                _copy(side, target, tensor.data_ptr(), size)
            _raise(side, opened.flag(to, "ready", slot), number)
            opened.sent[slot].record(side)
        return PeerTransfer(self, opened, number, tensors, route.received[slot])

    def _room_for(self, tensors: Tensors, most_rows: int) -> _Opened:
        need = sum(_rounded(most_rows * math.prod(t.shape[1:]) * t.element_size()) for t in tensors)
        if self._opened is None or self._opened.room < need:
            device = tensors[0].device
            room = 1 << max(20, (need - 1).bit_length())
            stream = self._opened.stream if self._opened is not None else torch.cuda.Stream(device)
            # The old slots may still be read; making new ones waits for every rank anyway.
            torch.cuda.synchronize(device)
            rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
            memory, handle = _mapped(self.group, _flags_size(ranks) + _SLOTS * room, device)
            self._opened = _Opened(rank, memory, handle, room, self._count + 1, stream)
        return self._opened


@dataclass(frozen=True)
class PeerTransfer:
    """Tensors on their way to this rank, and others from it, which are `kept` until they are gone."""

    peers: PeerCopies
    opened: _Opened
    number: int
    kept: Tensors
    received: Tensors

    def wait(self) -> Tensors:
        """The received tensors, in a slot: read them on the current stream, and say `done`."""
        opened, slot = self.opened, self.number % _SLOTS
        main = opened.main()
        with opened.here():
            _wait(main, opened.flag(opened.rank, "ready", slot), self.number)
            main.wait_event(opened.sent[slot])
        return self.received

    def abandon(self) -> None:
        """After an exception: the slot is freed once its data is there, and this way is not taken again, because the
        ranks may no longer count alike."""
        self.peers.unavailable = "an exchange was interrupted by an exception"
        self.wait()
        self.done()

    def done(self) -> None:
        """What reads the received tensors was given to the current stream: the slot may be written after it."""
        opened = self.opened
        with opened.here():
            opened.follow(opened.main())
            for other in range(len(opened.memory)):
                if other != opened.rank:
                    flag = opened.flag(other, "free", self.number % _SLOTS, opened.rank)
                    _raise(opened.stream, flag, self.number)


def _obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why these ranks cannot map one another's memory; None where they can. Every rank gets the same answer."""
    own: tuple[str, str, str | None] = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), None)
    if torch.version.hip is not None:
        own = (*own[:2], "never tried on AMD GPUs")
    else:
        found, failure = attempt(lambda: _driver() is not None and _symmetric_memory() is not None, False)
        own = (*own[:2], failure or (None if found else "this PyTorch has no symmetric memory"))
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, own, group=group)
    if len({host for host, _, _ in told}) > 1:
        return "the ranks are on several hosts"
    if len({uuid for _, uuid, _ in told}) < len(told):
        return "several ranks share a GPU"
    failed: str | None = next((reason for _, _, reason in told if reason is not None), None)
    if failed is not None:
        return failed
    _, failure = attempt(lambda: _mapped(group, _flags_size(len(told)), device), None)
    failures: list[str] = [""] * len(told)
    dist.all_gather_object(failures, failure, group=group)
    return next((reason for reason in failures if reason), None)


def _symmetric_memory() -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def _mapped(group: dist.ProcessGroup, size: int, device: torch.device) -> tuple[list[Tensor], Any]:
    """`size` bytes of every rank, the flags 0; all ranks make them together, and wait for one another."""
    module, rank, count = _symmetric_memory(), dist.get_rank(group), dist.get_world_size(group)
    # What is made in inference mode could not be written to outside it, and the next call may be there.
    with torch.inference_mode(False):
        own = module.empty(size, dtype=torch.uint8, device=device)
        handle = module.rendezvous(own, group.group_name)
        own[: _flags_size(count)].zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)
        memory = [own if other == rank else handle.get_buffer(other, (size,), torch.uint8) for other in range(count)]
    return memory, handle


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _flags_size(ranks: int) -> int:
    """Flags are 32-bit: `ready` of each slot, then `free` of each slot of each rank."""
    return _rounded(4 * _SLOTS * (1 + ranks))


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return library


def _copy(stream: torch.cuda.Stream, target: int, source: int, size: int) -> None:
    """`stream` copies `size` bytes between two addresses."""
    if size:
        _check(_driver().cuMemcpyDtoDAsync_v2(target, source, size, stream.cuda_stream), "cuMemcpyDtoDAsync")


def _wait(stream: torch.cuda.Stream, flag: int, number: int) -> None:
    """`stream` goes on once the flag has reached `number`; CU_STREAM_WAIT_VALUE_GEQ, which takes numbers as cyclic."""
    status = _driver().cuStreamWaitValue32_v2(stream.cuda_stream, flag, number & 0xFFFFFFFF, 0)
    _check(status, "cuStreamWaitValue32")


def _raise(stream: torch.cuda.Stream, flag: int, number: int) -> None:
    """`stream` sets the flag after all before it, which other GPUs then see too (CU_STREAM_WRITE_VALUE_DEFAULT)."""
    status = _driver().cuStreamWriteValue32_v2(stream.cuda_stream, flag, number & 0xFFFFFFFF, 0)
    _check(status, "cuStreamWriteValue32")


def _check(status: int, name: str) -> None:
    if status:
        raise RuntimeError(f"{name} failed with status {status} of the CUDA driver")
