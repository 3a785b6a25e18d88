"""`hal-attn env`: every environment variable, its value now, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from hal_attn import registry as registries
from hal_attn.cli import output
from hal_attn.errors import ConfigurationError, UnsupportedAttentionError
from hal_attn.registry import Registry
from hal_attn.selection import check_names
from hal_attn.settings import PREFIX, VARIABLES, Variable, closest_variable


@dataclass(frozen=True, slots=True)
class VariableStatus:
    """One variable of the table: its text now, None where it is not set, and what is wrong with that, if anything."""

    variable: Variable
    value: str | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class UnknownVariable:
    """A name with the prefix of this package that means nothing; `closest` is a known name like it, or empty."""

    name: str
    value: str
    closest: str

    @property
    def problem(self) -> str:
        """What is wrong, and what may have been meant."""
        remedy = f"did you mean {self.closest}?" if self.closest else "hal-attn env lists the known ones"
        return f"it is ignored; {remedy}"


@dataclass(frozen=True, slots=True)
class Environment:
    """The `HAL_ATTN_*` variables of a process, judged one by one."""

    variables: tuple[VariableStatus, ...]
    unknown: tuple[UnknownVariable, ...]

    @property
    def problems(self) -> dict[str, str]:
        """What is wrong, by the variable's name; empty where all is well."""
        wrong = {status.variable.name: status.problem for status in self.variables if status.problem}
        return {**wrong, **{unknown.name: unknown.problem for unknown in self.unknown}}


def env(as_json: output.Json = False) -> None:
    """Show every environment variable: what it means, what it allows, its value now, and what is wrong with that."""
    found = inspect(os.environ, registries.default_registry())
    if as_json:
        output.print_json(environment_json(found))
    else:
        _print(found)
    if found.problems:
        raise typer.Exit(1)


def inspect(environ: Mapping[str, str], registry: Registry) -> Environment:
    """Each variable of `environ`, judged by its own rule and by the platforms and backends of `registry`."""
    known = [variable.name for variable in VARIABLES]
    unknown = [name for name in sorted(environ) if name.startswith(PREFIX) and name not in known]
    return Environment(
        tuple(_status(variable, environ.get(variable.name), registry) for variable in VARIABLES),
        tuple(UnknownVariable(name, environ[name], closest_variable(name)) for name in unknown),
    )


def environment_json(found: Environment) -> dict[str, object]:
    """`found` as JSON: ok, variables, unknown."""
    return {
        "ok": not found.problems,
        "variables": [
            {
                "name": status.variable.name,
                "allowed": status.variable.values,
                "meaning": status.variable.meaning,
                "default": status.variable.default or None,
                "value": status.value,
                "problem": status.problem or None,
            }
            for status in found.variables
        ],
        "unknown": [
            {"name": unknown.name, "value": unknown.value, "closest": unknown.closest or None}
            for unknown in found.unknown
        ],
    }


def _status(variable: Variable, text: str | None, registry: Registry) -> VariableStatus:
    if text is None or not text.strip():
        return VariableStatus(variable, None)
    try:
        value = variable.parse(text.strip())
    except ValueError as error:
        return VariableStatus(variable, text, f"got {text!r}; allowed: {error}")
    return VariableStatus(variable, text, _registry_problem(variable, value, registry))


def _registry_problem(variable: Variable, value: object, registry: Registry) -> str:
    """What is wrong with a well-formed value because of what is installed; empty where nothing is."""
    try:
        if variable.field in ("backend", "disabled_backends"):
            check_names(cast("tuple[str, ...]", value), variable.name, registry)
        if variable.field == "platform":
            registry.check_platform(str(value))
    except ConfigurationError as error:
        return str(error).removeprefix(f"{variable.name}: ")
    if variable.field == "simulate":
        try:
            registry.simulation(str(value))
        except (ConfigurationError, UnsupportedAttentionError) as error:
            return str(error).removeprefix(f"{variable.name}={value}: ").removeprefix(f"{variable.name}: ")
    return ""


def _print(found: Environment) -> None:
    rows = [(status.variable.name, _description(status)) for status in found.variables]
    rows += [
        (unknown.name, output.fields({"now": unknown.value, "UNKNOWN": unknown.problem})) for unknown in found.unknown
    ]
    if found.problems:
        verdict = Text(f"{len(found.problems)} wrong: {', '.join(found.problems)}.", style="bold red")
    else:
        verdict = Text("All is well. A change takes effect at the next call.")
    output.show(output.table(("Variable", "Meaning"), rows, leading=1), "", verdict)


def _description(status: VariableStatus) -> RenderableType:
    variable = status.variable
    now = Text("not set") if status.value is None else Text(status.value, style="bold")
    if variable.default:
        now.append(f" (default: {variable.default})", style="not bold")
    rows: dict[str, RenderableType] = {"allowed": variable.values, "now": now}
    if status.problem:
        rows["WRONG"] = status.problem
    return Group(variable.meaning, output.fields(rows))
