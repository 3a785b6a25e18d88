"""Time and memory of a call: events of the device where it has them, else the host's clock."""

from __future__ import annotations

import gc
import json
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

Call = Callable[[], object]

# More than the last-level cache of any device here; a call that follows its clearing reads its inputs from memory.
_FLUSHED_BYTES = 256 * 2**20
_SAMPLE_MS = 2.0


def synchronise(device: torch.device) -> None:
    """Wait for what the device was given to do."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


@dataclass(frozen=True)
class Rounds:
    """How often calls are timed side by side: each for about `seconds`, at least `least` and at most `most` times."""

    seconds: float
    least: int
    most: int

    def of(self, milliseconds: float) -> int:
        """The number of samples of a call that takes so long."""
        return max(self.least, min(self.most, int(self.seconds * 1e3 / max(milliseconds, 1e-6))))


def interleaved(device: torch.device, calls: Mapping[str, Call], rounds: Rounds) -> dict[str, list[float]]:
    """Samples in milliseconds of each call, by name, taken in rounds, so that what slows the machine down slows all.

    On an accelerator each sample is the time between two events around one call, after its cache was cleared; nothing
    waits between calls, so that the device does not wait for the host. On the CPU the host's clock, caches as they are.
    """
    if device.type == "cpu":
        with no_collection():
            return _interleaved_on_cpu(calls, rounds)
    module = torch.get_device_module(device)
    junk = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
    trials = _between_events(module, calls, dict.fromkeys(calls, 2), junk)
    counts = {name: rounds.of(min(samples)) for name, samples in trials.items()}
    return _between_events(module, calls, counts, junk)


def _between_events(
    module: Any, calls: Mapping[str, Call], counts: Mapping[str, int], junk: Any
) -> dict[str, list[float]]:
    module.synchronize()
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for turn in range(max(counts.values())):
        for name, call in _shuffled(calls, turn):
            if turn < counts[name]:
                start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
                junk.zero_()
                start.record()
                call()
                end.record()
                events[name].append((start, end))
    module.synchronize()
    return {name: [float(start.elapsed_time(end)) for start, end in pairs] for name, pairs in events.items()}


@contextmanager
def no_collection() -> Iterator[None]:
    """Python collects no garbage within: that takes as long as a call, and falls on whichever is running."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _interleaved_on_cpu(calls: Mapping[str, Call], rounds: Rounds) -> dict[str, list[float]]:
    once = {name: min(_clocked(call), _clocked(call)) for name, call in calls.items()}
    # A short call is made several times in a sample, so that the clock and what interrupts weigh little.
    inner = {name: max(1, int(_SAMPLE_MS / max(ms, 1e-6))) for name, ms in once.items()}
    counts = {name: rounds.of(ms * inner[name]) for name, ms in once.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(max(counts.values())):
        for name, call in _shuffled(calls, turn):
            if turn < counts[name]:
                samples[name].append(_clocked(call, inner[name]))
    return samples


def _shuffled(calls: Mapping[str, Call], turn: int) -> list[tuple[str, Call]]:
    """In another order each round, the same in each run: what a call leaves to the next one, such as memory that went
    back to the system, falls on all."""
    return random.Random(turn).sample(list(calls.items()), len(calls))


def _clocked(call: Call, count: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) * 1e3 / count


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
