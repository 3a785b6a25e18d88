"""Time of a call among ranks: what every rank makes together, or the first alone."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hal_attn.bench.sequence_parallel.ranks import Ranks
from hal_attn.bench.timing import Call, synchronise

_MOST_LAYERS = 96


@dataclass(frozen=True)
class Effort:
    """How often: `repeats` samples of `layers` calls in a row, as the layers of a model follow one another; of more, up
    to 96, where a sample would not last `seconds`: its first layer waits for the host, and for the slower rank."""

    repeats: int
    layers: int
    warmups: int = 2
    seconds: float = 0.0

    def layers_of(self, milliseconds: float) -> int:
        """Calls in a sample, where one takes so long."""
        return max(self.layers, min(_MOST_LAYERS, math.ceil(self.seconds * 1e3 / milliseconds)))


def in_turns(ranks: Ranks, whole: Call, call: Call, effort: Effort) -> tuple[float, float]:
    """As `together`, of two calls, sample after sample of each in turns: every rank makes `whole`, which is the problem
    of all ranks, and `call`, which is its part of it.

    Devices get slower as they get warm and short of power, and quicker in a pause, so the two are measured as near to
    each other as can be, and their samples take about as long.
    """
    layers = _layers(ranks, call, effort)
    of_whole, of_part = _medians(ranks, ((whole, max(1, layers // ranks.size)), (call, layers)), effort.repeats)
    return of_whole, of_part


def together(ranks: Ranks, call: Call, effort: Effort) -> float:
    """Milliseconds of a call that every rank makes: of each sample the slowest rank's, of these the median."""
    (ms,) = _medians(ranks, ((call, _layers(ranks, call, effort)),), effort.repeats)
    return ms


def alone(ranks: Ranks, call: Call, effort: Effort) -> float:
    """Milliseconds of a call that rank 0 makes while the others wait."""
    ranks.meet()
    if not ranks.first:
        return ranks.of_first(None)[0]
    for _ in range(effort.warmups):
        call()
    return ranks.of_first(
        [statistics.median(_sample(ranks.device, call, effort.layers) for _ in range(effort.repeats))]
    )[0]


def _layers(ranks: Ranks, call: Call, effort: Effort) -> int:
    """Calls in a sample, the same on every rank; the first calls are made on the way."""
    for _ in range(effort.warmups):
        call()
    ranks.meet()
    return effort.layers_of(ranks.largest([_sample(ranks.device, call, 1)])[0])


def _medians(ranks: Ranks, calls: Sequence[tuple[Call, int]], repeats: int) -> list[float]:
    """Milliseconds of each call, by samples of so many calls in turns: of each sample the slowest rank's."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for (call, layers), taken in zip(calls, samples, strict=True):
            ranks.meet()
            taken.append(_sample(ranks.device, call, layers))
    return [statistics.median(ranks.largest(taken)) for taken in samples]


def _sample(device: torch.device, call: Call, layers: int) -> float:
    synchronise(device)
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(layers):
            call()
        return (time.perf_counter() - begin) * 1e3 / layers
    events = torch.get_device_module(device).Event
    start, end = events(enable_timing=True), events(enable_timing=True)
    start.record()
    for _ in range(layers):
        call()
    end.record()
    synchronise(device)
    return float(start.elapsed_time(end)) / layers
