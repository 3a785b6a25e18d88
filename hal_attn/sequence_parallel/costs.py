"""Which backend a group takes: what each costs on each rank, where that was measured."""

from __future__ import annotations

from collections.abc import Sequence

from hal_attn.selection import Selection

# By the name of a backend, best first: milliseconds, None where that was not measured.
Costs = dict[str, float | None]


def costs_of(selection: Selection) -> Costs:
    """Of one call, for the backends that take it. One whose results are wrong is not among them, if any other is."""
    times = dict(selection.measured)
    wrong = dict(selection.measurement.left_out) if selection.measurement and times else {}
    able = (candidate.backend.name for candidate in selection.considered if not candidate.refusals)
    return {name: times.get(name) for name in able if name not in wrong}


def added(one: Costs | None, other: Costs) -> Costs:
    """Of both: the backends that take both, and the sum where both are known."""
    if one is None:
        return other
    pairs = {name: (cost, other[name]) for name, cost in one.items() if name in other}
    return {name: None if a is None or b is None else a + b for name, (a, b) in pairs.items()}


def best_for_all(costs: Sequence[Costs]) -> str | None:
    """The backend for all ranks with these costs. All wait for the slowest, so that one counts; without times it is
    the first of the first rank's. None where none takes the calls of all."""
    common = [name for name in (costs[0] if costs else ()) if all(name in other for other in costs)]
    slowest = {name: max(times) for name in common if (times := _known([other[name] for other in costs]))}
    return min(slowest, key=lambda name: slowest[name]) if slowest else next(iter(common), None)


def _known(times: Sequence[float | None]) -> list[float]:
    """The times, none of them where one is missing."""
    known = [time for time in times if time is not None]
    return known if len(known) == len(times) else []
