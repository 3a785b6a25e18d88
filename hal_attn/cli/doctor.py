"""`hal-attn doctor`: what is here, what is usable, and for everything else why not and what to do."""

from __future__ import annotations

import os
import platform as machine
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import torch
import typer
from rich.console import Group, RenderableType
from rich.text import Text

import hal_attn
from hal_attn import inventory
from hal_attn import registry as registries
from hal_attn.cli import output
from hal_attn.cli.env import Environment, environment_json, inspect
from hal_attn.inventory import BackendStatus, PlatformStatus
from hal_attn.platform import DeviceInfo
from hal_attn.registry import Registry
from hal_attn.settings import read


@dataclass(frozen=True, slots=True)
class Report:
    """What one examination found; `only` is the platform that HAL_ATTN_PLATFORM allows, None for all."""

    versions: Mapping[str, str]
    platforms: tuple[PlatformStatus, ...]
    broken: frozenset[str]
    backends: tuple[BackendStatus, ...]
    environment: Environment
    only: str | None

    @property
    def problems(self) -> tuple[str, ...]:
        """What makes all not well. A vendor that is not here is no problem, a plugin that breaks is one."""
        found = [
            f"the plugin {status.name} is broken; {status.remedy}"
            for status in self.platforms
            if status.name in self.broken
        ]
        found += [f"{name}: {problem}" for name, problem in self.environment.problems.items()]
        if not any(status.available for status in self.platforms if self.only in (None, status.name)):
            which = "no platform is usable" if self.only is None else f"HAL_ATTN_PLATFORM={self.only} is not usable"
            found.append(f"{which}; its remedy is in the table of platforms")
        elif not any(status.usable for status in self.backends):
            found.append("no backend is usable, so no call can run; the table of backends says why")
        return tuple(found)


def doctor(as_json: output.Json = False) -> None:
    """Show platforms, devices, versions and backends: usable, or why not and what to do about it.

    A vendor that is not here is no fault; a broken plugin or a wrong environment variable is one.
    """
    report = examine(registries.default_registry())
    if as_json:
        output.print_json(_as_json(report))
    else:
        _print(report)
    if report.problems:
        raise typer.Exit(1)


def examine(registry: Registry) -> Report:
    """The state of this machine, as the platforms of `registry` see it."""
    environment = inspect(os.environ, registry)
    # One wrong value must not hide what else is to be said.
    settings = read({name: value for name, value in os.environ.items() if name not in environment.problems})
    platforms = inventory.platforms(registry, settings)
    backends = inventory.backends(registry=registry, settings=settings)
    versions = {
        "hal_attn": hal_attn.__version__,
        "python": machine.python_version(),
        "torch": str(torch.__version__),
        "system": f"{machine.system()} {machine.machine()}",
    }
    return Report(
        versions,
        platforms,
        frozenset(plugin.name for plugin in registry.broken),
        backends,
        environment,
        settings.platform,
    )


def _as_json(report: Report) -> dict[str, object]:
    return {
        "ok": not report.problems,
        "problems": list(report.problems),
        "versions": dict(report.versions),
        "platforms": [
            {**asdict(status), "versions": dict(status.versions), "broken": status.name in report.broken}
            for status in report.platforms
        ],
        "backends": [{**asdict(status), "remedy": _remedy(status)} for status in report.backends],
        "environment": environment_json(report.environment),
    }


def _remedy(status: BackendStatus) -> str:
    """What would make this backend usable; empty where it is, or where nothing is known to help."""
    if status.reason is None:
        return ""
    if status.reason.hint or not status.install:
        return status.reason.hint
    return f"install it with: {status.install}"


def _print(report: Report) -> None:
    platforms = [_platform_row(status, status.name in report.broken) for status in report.platforms]
    output.show(
        "hal-attn {hal_attn}, Python {python}, PyTorch {torch}, {system}".format(**report.versions),
        "",
        output.table(("Platform", "State", "What was found"), platforms),
        "",
        output.table(("Backend", "Platform", "State", "Why, and what to do"), _backend_rows(report.backends)),
        "",
        _environment(report.environment),
        "",
        _verdict(report),
    )


def _platform_row(status: PlatformStatus, broken: bool) -> tuple[RenderableType, ...]:
    lines: list[RenderableType] = [status.reason]
    lines += _device_lines(status.devices)
    versions = [f"{name} {version}" for name, version in status.versions if name != "torch"]
    if versions:
        lines.append(", ".join(versions))
    if status.process_group_backend and status.available:
        lines.append(f"process groups: {status.process_group_backend}")
    if status.remedy:
        lines.append(Text(f"remedy: {status.remedy}", style="bold"))
    state = "BROKEN" if broken else "not usable" if not status.available else "usable"
    if status.simulated and status.available:
        state = "SIMULATED"
    return status.name, output.state(state), Group(*lines)


def _device_lines(devices: Sequence[DeviceInfo]) -> list[str]:
    """One line for each run of equal devices."""
    lines = []
    for facts, equal in groupby(devices, key=lambda device: (device.name, device.architecture, device.memory_bytes)):
        names = [device.device for device in equal]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        name, architecture, memory = facts
        size = "" if memory is None else f"{memory / 2**30:.1f} GiB"
        lines.append(f"{span}: {', '.join(fact for fact in (name, architecture, size) if fact)}")
    return lines


def _backend_rows(backends: Sequence[BackendStatus]) -> list[tuple[RenderableType, ...]]:
    """One row for each usable backend, and one for each run of backends that lack the same thing."""
    rows: list[tuple[RenderableType, ...]] = []
    for (platform, reason, remedy), equal in groupby(backends, key=lambda s: (s.platform, s.reason, _remedy(s))):
        statuses = list(equal)
        if reason is not None:
            names = "\n".join(status.name for status in statuses)
            rows.append((names, platform, output.state("not usable"), output.refusal(reason, remedy, "remedy")))
        else:
            rows += [(s.name, platform, output.state("SIMULATED" if s.simulated else "usable"), "") for s in statuses]
    return rows


def _environment(found: Environment) -> RenderableType:
    rows: dict[str, RenderableType] = {
        status.variable.name: status.value for status in found.variables if status.value is not None
    }
    rows.update((unknown.name, unknown.value) for unknown in found.unknown)
    if not rows:
        return "Environment: no HAL_ATTN_* variable is set (hal-attn env lists them)."
    for name, problem in found.problems.items():
        rows[name] = Group(str(rows[name]), output.fields({"WRONG": problem}))
    return output.table(("Variable", "Value"), rows.items())


def _verdict(report: Report) -> RenderableType:
    if report.problems:
        return Group(Text("Not well:", style="bold red"), output.bullets(report.problems))
    usable = [
        f"{status.name} (SIMULATED)" if status.simulated else status.name
        for status in report.platforms
        if status.available
    ]
    count = sum(status.usable for status in report.backends)
    return Text(
        f"All is well: {', '.join(usable)} usable, with {count} of {len(report.backends)} backends.", style="green"
    )
