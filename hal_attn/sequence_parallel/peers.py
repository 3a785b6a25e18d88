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
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hal_attn.guard import attempt

Tensors = tuple[Tensor, ...]

_SLOTS = 2
_ALIGNMENT = 256


@dataclass
class _Opened:
    """What the ranks made together.

    Attributes:
        memory: by rank, its flags and slots as this rank maps them, uint8; `handle` keeps them mapped.
        room: bytes of a slot.
        first: the number of the first exchange that used it.
    """

    memory: list[Tensor]
    handle: Any
    room: int
    first: int
    stream: torch.cuda.Stream


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
        rank = dist.get_rank(self.group)
        shapes = [(rows, *tensor.shape[1:]) for tensor in tensors]
        # Only dense memory is copied by an engine; anything else would be copied by a kernel.
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        opened = self._room_for(tensors, most_rows)
        self._count += 1
        number, slot = self._count, self._count % _SLOTS
        main, side = torch.cuda.current_stream(opened.stream.device), opened.stream
        side.wait_stream(main)
        if number - _SLOTS >= opened.first:
            _wait(side, _flag(opened.memory[rank], "free", slot, to), number - _SLOTS)
        with torch.cuda.stream(side):
            targets = _views(opened, to, slot, [tensor.shape for tensor in tensors], tensors)
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor)
        _raise(side, _flag(opened.memory[to], "ready", slot), number)
        sent = side.record_event()
        return PeerTransfer(self, opened, number, sent, tensors, tuple(_views(opened, rank, slot, shapes, tensors)))

    def _room_for(self, tensors: Tensors, most_rows: int) -> _Opened:
        need = sum(_rounded(most_rows * math.prod(t.shape[1:]) * t.element_size()) for t in tensors)
        if self._opened is None or self._opened.room < need:
            device = tensors[0].device
            room = 1 << max(20, (need - 1).bit_length())
            stream = self._opened.stream if self._opened is not None else torch.cuda.Stream(device)
            # The old slots may still be read; making new ones waits for every rank anyway.
            torch.cuda.synchronize(device)
            memory, handle = _mapped(self.group, _flags_size(self.group) + _SLOTS * room, device)
            self._opened = _Opened(memory, handle, room, self._count + 1, stream)
        return self._opened


@dataclass(frozen=True)
class PeerTransfer:
    """Tensors on their way to this rank, and others from it."""

    peers: PeerCopies
    opened: _Opened
    number: int
    sent: torch.cuda.Event
    kept: Tensors
    received: Tensors

    def wait(self) -> Tensors:
        """The received tensors, in a slot: read them on the current stream, and say `done`."""
        rank, main = dist.get_rank(self.peers.group), torch.cuda.current_stream(self.opened.stream.device)
        _wait(main, _flag(self.opened.memory[rank], "ready", self.number % _SLOTS), self.number)
        main.wait_event(self.sent)
        return self.received

    def abandon(self) -> None:
        """After an exception: the slot is freed once its data is there, and this way is not taken again, because the
        ranks may no longer count alike."""
        self.peers.unavailable = "an exchange was interrupted by an exception"
        self.wait()
        self.done()

    def done(self) -> None:
        """What reads the received tensors was given to the current stream: the slot may be written after it."""
        rank, side = dist.get_rank(self.peers.group), self.opened.stream
        side.wait_stream(torch.cuda.current_stream(side.device))
        for other, memory in enumerate(self.opened.memory):
            if other != rank:
                _raise(side, _flag(memory, "free", self.number % _SLOTS, rank), self.number)


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
    _, failure = attempt(lambda: _mapped(group, _flags_size(group), device), None)
    failures: list[str] = [""] * len(told)
    dist.all_gather_object(failures, failure, group=group)
    return next((reason for reason in failures if reason), None)


def _symmetric_memory() -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def _mapped(group: dist.ProcessGroup, size: int, device: torch.device) -> tuple[list[Tensor], Any]:
    """`size` bytes of every rank, the flags 0; all ranks make them together, and wait for one another."""
    module = _symmetric_memory()
    own = module.empty(size, dtype=torch.uint8, device=device)
    handle = module.rendezvous(own, group.group_name)
    own[: _flags_size(group)].zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    rank = dist.get_rank(group)
    ranks = range(dist.get_world_size(group))
    return [own if other == rank else handle.get_buffer(other, (size,), torch.uint8) for other in ranks], handle


def _views(opened: _Opened, rank: int, slot: int, shapes: Sequence[Sequence[int]], like: Tensors) -> list[Tensor]:
    """Tensors of these shapes, one after another, in a slot of `rank`."""
    begin = _flags_size_of(len(opened.memory)) + slot * opened.room
    views = []
    for shape, tensor in zip(shapes, like, strict=True):
        size = math.prod(shape) * tensor.element_size()
        views.append(opened.memory[rank][begin : begin + size].view(tensor.dtype).view(*shape))
        begin += _rounded(size)
    return views


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _flags_size(group: dist.ProcessGroup) -> int:
    return _flags_size_of(dist.get_world_size(group))


def _flags_size_of(ranks: int) -> int:
    """Flags are 32-bit: `ready` of each slot, then `free` of each slot of each rank."""
    return _rounded(4 * _SLOTS * (1 + ranks))


def _flag(memory: Tensor, name: str, slot: int, rank: int = 0) -> int:
    """The address of a flag, in the memory of who waits for it: "ready" of an own slot, or "free" of one of `rank`."""
    place = slot if name == "ready" else _SLOTS * (1 + rank) + slot
    return memory.data_ptr() + 4 * place


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return library


def _wait(stream: torch.cuda.Stream, flag: int, number: int) -> None:
    """`stream` goes on once the flag has reached `number`; CU_STREAM_WAIT_VALUE_GEQ, which takes numbers as cyclic."""
    # The default stream has one handle on all devices, which means that of the current one.
    with torch.cuda.device(stream.device):
        status = _driver().cuStreamWaitValue32_v2(stream.cuda_stream, flag, number & 0xFFFFFFFF, 0)
    _check(status, "cuStreamWaitValue32")


def _raise(stream: torch.cuda.Stream, flag: int, number: int) -> None:
    """`stream` sets the flag after all before it, which other GPUs then see too (CU_STREAM_WRITE_VALUE_DEFAULT)."""
    with torch.cuda.device(stream.device):
        status = _driver().cuStreamWriteValue32_v2(stream.cuda_stream, flag, number & 0xFFFFFFFF, 0)
    _check(status, "cuStreamWriteValue32")


def _check(status: int, name: str) -> None:
    if status:
        raise RuntimeError(f"{name} failed with status {status} of the CUDA driver")
