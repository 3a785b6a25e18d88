"""The measurement: every call in every round, one thread, and of each its median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from hal_attn.bench import nothing
from hal_attn.bench.dispatch import calls, peers
from hal_attn.bench.dispatch.calls import Timed
from hal_attn.bench.machine import facts, threads
from hal_attn.bench.report import Report
from hal_attn.bench.timing import no_collection, synchronise
from hal_attn.registry import default_registry
from hal_attn.settings import read

KIND = "dispatch"
Tick = Callable[[str, int, int], None]

# Of one call in one round: what takes long needs no many calls to be told from what does not.
_ROUND_US = 10_000.0
# Parts of the first round and calls in each: the quickest part has none of what only a first call does, as imports.
_PARTS, _PART = 5, 10


@dataclass(frozen=True)
class Effort:
    """How often: `rounds` of `calls` calls of each, of a slow one fewer."""

    rounds: int
    calls: int


@dataclass(frozen=True)
class Row:
    """What one call costs on the host, in microseconds.

    Attributes:
        key, group, ours: as in `Timed`.
        us: the median of one call's time.
        over: the name of the bare call that it ends in.
        over_us: the median of what it takes beyond that one in the same round.
        mark: what `over_us` is to keep; `below` names the row that it comes from.
    """

    key: str
    group: str
    ours: bool
    us: float
    over: str | None = None
    over_us: float | None = None
    mark: float | None = None
    below: str | None = None


def measure(device: torch.device, effort: Effort, with_peers: bool, tick: Tick) -> Report:
    """All calls on `device`, and those with a kernel that does nothing."""
    platform = default_registry().platform_for(device, read())
    with _one_thread(), torch.no_grad(), nothing.installed(), no_collection():
        with peers.opened(device) if with_peers else _nobody() as (others, notes):
            names = {timed.name for timed in others}
            diffusers = peers.DIFFUSERS_UNCHECKED if peers.DIFFUSERS_UNCHECKED in names else None
            failed: list[str] = []
            if device.type == "cpu" and not platform.simulated:
                own = list(calls.of_cpu())
            else:
                own, failed = calls.of_backends(device)
                notes = [*notes, *failed]
            own += [calls.bare_sdpa(device), *calls.of_nothing(diffusers)]
            rows = _rows([*own, *others], _times(device, [*own, *others], effort, tick))
        found = facts(
            device, threads=threads(), effort=f"median of {effort.rounds} rounds of up to {effort.calls} calls of each"
        )
    return Report(KIND, "us", found, tuple(asdict(row) for row in rows), tuple(notes), not failed)


def _times(device: torch.device, timed: Sequence[Timed], effort: Effort, tick: Tick) -> dict[str, list[float]]:
    """Microseconds a call, by name, one a round."""
    found: dict[str, list[float]] = {one.name: [] for one in timed}
    counts: dict[str, int] = {}
    for turn in range(effort.rounds + 1):
        tick("round", turn, effort.rounds + 1)
        for one in timed:
            with one.around():
                if turn:
                    found[one.name].append(_time(device, one, counts[one.name]))
                else:
                    counts[one.name] = _count(device, one, effort.calls)
    tick("done", effort.rounds + 1, effort.rounds + 1)
    return found


def _count(device: torch.device, timed: Timed, most: int) -> int:
    """How many calls a round has time for; asking warms them up."""
    us = min(_time(device, timed, min(most, _PART)) for _ in range(_PARTS))
    return max(1, min(most, int(_ROUND_US / us)))


def _time(device: torch.device, timed: Timed, count: int) -> float:
    """The host's time alone: the device has finished what came before, and is waited for afterwards."""
    call = timed.call
    synchronise(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    end = time.perf_counter()
    synchronise(device)
    return (end - begin) / count * 1e6


def _rows(timed: Sequence[Timed], times: dict[str, list[float]]) -> list[Row]:
    over = {
        one.name: statistics.median(a - b for a, b in zip(times[one.name], times[one.over], strict=True))
        for one in timed
        if one.over is not None
    }
    order = list(dict.fromkeys(one.group for one in timed))
    rows = [
        Row(
            one.name,
            one.group,
            one.ours,
            statistics.median(times[one.name]),
            one.over,
            over.get(one.name),
            one.mark if one.below is None else over[one.below],
            one.below,
        )
        for one in timed
    ]
    return sorted(rows, key=lambda row: order.index(row.group))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _nobody() -> Iterator[tuple[list[Timed], list[str]]]:
    yield [], []
