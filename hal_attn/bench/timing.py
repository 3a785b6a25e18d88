"""Time and memory of a call: events of the device where it has them, else the host's clock."""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hal_attn.bench.ranks import Ranks, synchronise

Call = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How often: `repeats` samples of `layers` calls in a row, as the layers of a model follow one another."""

    repeats: int
    layers: int
    warmups: int = 2


def together(ranks: Ranks, call: Call, effort: Effort) -> float:
    """Milliseconds of a call that every rank makes: of each sample the slowest rank's, of these the median."""
    for _ in range(effort.warmups):
        call()
    samples = []
    for _ in range(effort.repeats):
        ranks.meet()
        samples.append(_sample(ranks.device, call, effort.layers))
    return statistics.median(ranks.largest(samples))


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


def peak_bytes(device: torch.device, call: Call) -> int:
    """The most memory of tensors that a call holds beyond what was held before it."""
    if device.type == "cpu":
        return _peak_on_cpu(call)
    module = torch.get_device_module(device)
    synchronise(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    call()
    synchronise(device)
    return int(module.max_memory_allocated(device) - before)


def _peak_on_cpu(call: Call) -> int:
    """As the profiler saw it allocate and free: the CPU's allocator keeps no peak."""
    steps = [event["args"]["Bytes"] for event in trace(call, memory=True) if event["name"] == "[memory]"]
    return max(0, *accumulate(steps)) if steps else 0


def trace(call: Call, *, memory: bool = False, keep: Path | None = None) -> list[dict[str, Any]]:
    """The events of one call in the profiler's Chrome format, in the order of time; the file itself in `keep`."""
    # Else the profiler says on stderr that it starts and stops, each time.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import profile

    with TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        with profile(profile_memory=memory) as profiler:
            call()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return sorted((event for event in events if "ts" in event and "name" in event), key=lambda event: event["ts"])


def host_waits(device: torch.device, call: Call) -> int | None:
    """How often a call makes the host wait for the device, as far as PyTorch notices; None where it cannot tell."""
    if device.type != "cuda":
        return None
    synchronise(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    synchronise(device)
    # Its own notice, at the first use in a process, is about synchronizing operations too.
    return sum("called a synchronizing" in str(warning.message) for warning in found)
