"""Memory of each rank that the others of one host map: two slots to write into, and flags beside them.

```
flags   ready[slot][sender]   the sender's data is in this slot        free[slot][reader]   that rank has read what this
slots   0 | 1                                                                              one wrote into its slot
```

Streams wait for flags and set them. A slot is written again only after its reader freed it.
"""

from __future__ import annotations

import math
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hal_attn.guard import attempt
from hal_attn.sequence_parallel.current import current
from hal_attn.sequence_parallel.driver import driver

SLOTS = 2
_ALIGNMENT = 256


@dataclass
class Slots:
    """What the ranks made together.

    Attributes:
        rank: this one in the group.
        memory: by rank, its flags and slots as this rank maps them, uint8; `handle` keeps them mapped.
        room: bytes of a slot.
        first: the number of the first exchange that used it.
        stream: the side stream; `passing` is what it waits for, `sent`, by slot, what waits for it.
        kept: what was worked out for a kind of exchange.
    """

    rank: int
    memory: list[Tensor]
    handle: Any
    room: int
    first: int
    stream: torch.cuda.Stream
    kept: dict[object, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.addresses = [memory.data_ptr() for memory in self.memory]
        self.passing, self.sent = torch.cuda.Event(), [torch.cuda.Event() for _ in range(SLOTS)]

    def here(self) -> AbstractContextManager[Any]:
        """Its GPU as the current one."""
        return current(self.stream.device)

    def main(self) -> torch.cuda.Stream:
        """The current stream of its GPU."""
        return torch.cuda.current_stream(self.stream.device)

    def follow(self, main: torch.cuda.Stream) -> None:
        """The side stream goes on after what `main` was given so far."""
        self.passing.record(main)
        self.stream.wait_event(self.passing)

    def ready(self, owner: int, slot: int, sender: int) -> int:
        """The address of a flag of `owner`, who waits for it."""
        return self.addresses[owner] + 4 * (SLOTS * sender + slot)

    def free(self, owner: int, slot: int, reader: int) -> int:
        """The address of a flag of `owner`, who waits for it."""
        return self.addresses[owner] + 4 * (SLOTS * (len(self.memory) + reader) + slot)

    def begin(self, slot: int) -> int:
        """Where a slot begins, from the start of the memory."""
        return flags_size(len(self.memory)) + slot * self.room

    def view(self, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape in the own memory."""
        size = math.prod(shape) * dtype.itemsize
        return self.memory[self.rank][place : place + size].view(dtype).view(shape)


def rounded(size: int) -> int:
    """Room for `size` bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def flags_size(ranks: int) -> int:
    """Flags are 32-bit: `ready` of each rank's slots, then `free` of each."""
    return rounded(4 * SLOTS * 2 * ranks)


def obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why these ranks cannot map one another's memory; None where they can. Every rank gets the same answer."""
    own: tuple[str, str, str | None] = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), None)
    if torch.version.hip is not None:
        own = (*own[:2], "never tried on AMD GPUs")
    else:
        found, failure = attempt(lambda: driver() is not None and _symmetric_memory() is not None, False)
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
    _, failure = attempt(lambda: mapped(group, flags_size(len(told)), device, 0), None)
    failures: list[str] = [""] * len(told)
    dist.all_gather_object(failures, failure, group=group)
    return next((reason for reason in failures if reason), None)


def mapped(group: dist.ProcessGroup, size: int, device: torch.device, count: int) -> tuple[list[Tensor], Any]:
    """`size` bytes of every rank, and the flags at the number of exchanges so far, since numbers are cyclic; all ranks
    make them together, and wait for one another."""
    module, rank, ranks = _symmetric_memory(), dist.get_rank(group), dist.get_world_size(group)
    # What is made in inference mode could not be written to outside it, and the next call may be there.
    with torch.inference_mode(False):
        own = module.empty(size, dtype=torch.uint8, device=device)
        handle = module.rendezvous(own, group.group_name)
        own[: flags_size(ranks)].view(torch.int32).fill_(as_int32(count))
        torch.cuda.synchronize(device)
        dist.barrier(group)
        memory = [own if other == rank else handle.get_buffer(other, (size,), torch.uint8) for other in range(ranks)]
    return memory, handle


def as_int32(number: int) -> int:
    """The last 32 bits of a number, as a signed one."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _symmetric_memory() -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory
