"""Whether a run shows what was asked for, and what it does not show, in sentences for a person."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hal_attn.testing.matrix import Column
from hal_attn.testing.merge import Merged
from hal_attn.testing.report import BackendReport, PlatformReport


@dataclass(frozen=True, slots=True)
class Demand:
    """What was asked for. What is named must run; with `hardware`, all of it on devices that are not simulated."""

    platforms: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    hardware: bool = False


def problems(merged: Merged, demand: Demand) -> tuple[str, ...]:
    """Why the demand is not met; empty where it is.

    Over several machines a backend that is not available on one may be shown by another.
    """
    found = [*_failures(merged)]
    backends = [column for column in merged.columns if column.backend]
    if not any(check.status == "passed" for column in backends for check in column.checks):
        found.append("nothing passed" if backends else "nothing passed, because no backend ran")
    found += _absent(merged, demand)
    return tuple(dict.fromkeys(found))


def simulated(merged: Merged) -> tuple[str, ...]:
    """One sentence for each platform that ran over simulated kernels."""
    names = dict.fromkeys((column.platform, column.machine) for column in merged.columns if column.simulated)
    return tuple(
        f"{platform}{_on(machine)} was SIMULATED: stand-ins for the vendor's kernels ran on the CPU, no {platform} "
        "device. It shows that calls keep to the vendor's written rules, not that its hardware computes right."
        for platform, machine in names
    )


def declared(merged: Merged) -> tuple[str, ...]:
    """One sentence for each backend that was held to another error than that of the precision rule."""
    return tuple(
        f"{backend.platform}/{backend.name}{_on(label)} declares the error in {dtype}: "
        f"{times:g} times that of the precision rule was allowed."
        for label, report in merged.machines
        for backend in report.backends
        for dtype, times in backend.tolerances
        if backend.available
    )


def not_run(merged: Merged) -> tuple[str, ...]:
    """One sentence for each platform that is not here, and for the backends of one that lack the same thing."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for label, report in merged.machines:
        away = {platform.name for platform in report.platforms if not platform.available}
        parts: tuple[PlatformReport | BackendReport, ...] = (*report.platforms, *report.backends)
        for part in parts:
            if part.available or (isinstance(part, BackendReport) and part.platform in away):
                continue
            owner = part.platform if isinstance(part, BackendReport) else ""
            found.setdefault((owner, label, _why(part)), []).append(part.name)
    return tuple(
        f"{', '.join(names)}{f' of {owner}' if owner else ''}{_on(label)} did not run: {why}"
        for (owner, label, why), names in found.items()
    )


def checks(number: int) -> str:
    """So many checks, in words."""
    return f"{number:,} check" if number == 1 else f"{number:,} checks"


def _failures(merged: Merged) -> Iterator[str]:
    for column in merged.columns:
        failed = [check for check in column.checks if check.status == "failed"]
        if failed:
            rules = ", ".join(dict.fromkeys(check.rule for check in failed))
            yield f"{_name(column)} failed {checks(len(failed))}; broken rules: {rules}"


def _absent(merged: Merged, demand: Demand) -> Iterator[str]:
    """What was named, or has to run on hardware, and passed nothing there."""
    shown = [column for column in merged.columns if any(check.status == "passed" for check in column.checks)]
    enough = [column for column in shown if not (demand.hardware and column.simulated)]
    platforms = {column.platform for column in enough}
    names = {column.backend for column in enough}
    pairs = {(column.platform, column.backend) for column in enough}
    for _, report in merged.machines:
        for platform in report.platforms:
            if (demand.hardware or platform.name in demand.platforms) and platform.name not in platforms:
                yield _lack(platform)
        for backend in report.backends:
            named = backend.name in demand.backends and backend.name not in names
            # A platform that lacks its device stands for all its backends.
            missing = (
                demand.hardware and backend.platform in platforms and (backend.platform, backend.name) not in pairs
            )
            if named or missing:
                yield _lack(backend)


def _lack(part: PlatformReport | BackendReport) -> str:
    name = f"{part.platform}/{part.name}" if isinstance(part, BackendReport) else part.name
    if not part.available:
        return f"{name} did not run: {_why(part)}"
    if part.simulated:
        return f"{name} was SIMULATED, which shows nothing about a device"
    return f"{name} passed nothing"


def _why(part: PlatformReport | BackendReport) -> str:
    return f"{part.reason}; {part.remedy}" if part.remedy else part.reason


def _name(column: Column) -> str:
    return f"{column.platform}{f'/{column.backend}' if column.backend else ''}{_on(column.machine)}"


def _on(machine: str) -> str:
    return f" on {machine}" if machine else ""
