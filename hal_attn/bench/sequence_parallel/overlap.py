"""How much of the communication of a call is hidden under its kernels, from the profiler's trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]

_COMMUNICATION = ("nccl", "rccl", "hccl")
_ON_THE_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Overlap:
    """Microseconds of a call on the device.

    Attributes:
        communication: a transfer runs, or waits for its other end.
        computation: any other kernel runs.
        hidden: both at once.
        whole: from the first event to the last.
    """

    communication: float
    computation: float
    hidden: float
    whole: float

    @property
    def part(self) -> float:
        """The part of the communication that is hidden; 1 where there is none."""
        return self.hidden / self.communication if self.communication else 1.0


def intervals(events: Iterable[Mapping[str, Any]]) -> tuple[list[Interval], list[Interval]]:
    """(start, end) of each transfer and of each other kernel, from events of the profiler's Chrome format; those of the
    host are left out."""
    transfers: list[Interval] = []
    kernels: list[Interval] = []
    for event in events:
        if event.get("cat") in _ON_THE_DEVICE:
            name = str(event["name"]).lower()
            found = transfers if any(part in name for part in _COMMUNICATION) else kernels
            found.append((event["ts"], event["ts"] + event["dur"]))
    return transfers, kernels


def overlap(events: Iterable[Mapping[str, Any]]) -> Overlap:
    """From events of the profiler's Chrome format."""
    transfers, kernels = intervals(events)
    apart, busy = _joined(transfers), _joined(kernels)
    everything = _joined(transfers + kernels)
    whole = everything[-1][1] - everything[0][0] if everything else 0.0
    hidden = _length(apart) + _length(busy) - _length(everything)
    return Overlap(_length(apart), _length(busy), hidden, whole)


def _joined(found: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(found):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _length(found: Iterable[Interval]) -> float:
    return sum(end - start for start, end in found)
