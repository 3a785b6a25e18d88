"""The ranks that measure together: who this one is, and what they tell one another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from hal_attn.bench.timing import synchronise, trace
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.registry import default_registry
from hal_attn.settings import read

# Long enough for the slowest whole problem on one rank, short enough that a rank that died is noticed.
_TIMEOUT = timedelta(minutes=5)

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This rank of `size`, on its device; alone there is no process group."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that reports."""
        return self.rank == 0

    def meet(self) -> None:
        """Wait for all ranks, and for what they gave their devices to do."""
        synchronise(self.device)
        if self.size > 1:
            dist.barrier()
            synchronise(self.device)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest of all ranks; NaN where one has NaN."""
        return [max(column, key=lambda value: (value != value, value)) for column in self._columns(values)]

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean of each value over the ranks."""
        return [sum(column) / self.size for column in self._columns(values)]

    def of_first(self, values: Sequence[float] | None) -> list[float]:
        """The values of rank 0, on every rank; the others give None and wait."""
        told: list[Sequence[float] | None] = [values]
        if self.size > 1:
            dist.broadcast_object_list(told, src=0)
        return list(told[0] or ())

    def first_failure(self, failure: str | None) -> str | None:
        """What went wrong on the first rank where something did; None where all is well."""
        return next((found for found in self._gathered(failure) if found is not None), None)

    def _columns(self, values: Sequence[float]) -> Iterator[tuple[float, ...]]:
        return zip(*self._gathered(list(values)), strict=True)

    def _gathered(self, value: T) -> list[T]:
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
        return found


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks that `torchrun` started, or one alone, each on its own device of this type.

    The process group ends with the block, so that none of its threads runs while the interpreter exits: nothing outside
    may keep it, or what holds it.

    Raises:
        InvalidAttentionInputError: more ranks on this machine than it has devices.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    platform = default_registry().platform_for(device, read())
    if device.type != "cpu":
        local = int(os.environ.get("LOCAL_RANK", device.index or 0))
        count = torch.accelerator.device_count() if hasattr(torch, "accelerator") else torch.cuda.device_count()
        if local >= count:
            raise InvalidAttentionInputError(
                "--nproc-per-node", f"rank {local} of this machine", f"as many ranks as it has devices, {count}"
            )
        device = torch.device(device.type, local)
        torch.get_device_module(device).set_device(device)
    if size == 1:
        yield Ranks(0, 1, device)
        return
    # The profiler's first run imports modules of PyTorch that keep the default group of that moment for ever, in the
    # default arguments of their functions; without a group yet they keep none.
    trace(lambda: None)
    dist.init_process_group(platform.process_group_backend, timeout=_TIMEOUT)
    try:
        yield Ranks(rank, size, device)
    finally:
        dist.destroy_process_group()
