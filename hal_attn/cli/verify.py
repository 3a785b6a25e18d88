"""`hal-attn verify`: is every backend here right in all that it claims, and does it refuse the rest by name?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hal_attn.cli import output
from hal_attn.errors import InvalidAttentionInputError, closest
from hal_attn.registry import Registry, default_registry
from hal_attn.testing import html, junit, matrix, merge, verdict
from hal_attn.testing import verify as run_kit
from hal_attn.testing.matrix import Column
from hal_attn.testing.merge import Merged
from hal_attn.testing.report import Effort, Report
from hal_attn.testing.verdict import Demand

_Tick = Callable[[str, int, int], None]
_FAILURES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class _Files:
    """Where the report goes; None is nowhere."""

    junit: Path | None
    json: str | None
    html: Path | None


def verify(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="With --merge: the reports.")] = None,
    platform: Annotated[str | None, typer.Option(metavar="NAME", help="Only this one; it must run.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; it must run. May be given again.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Every dtype and many lengths, or each feature once.")
    ] = False,
    require_hardware: Annotated[
        bool, typer.Option("--require-hardware", help="Fail unless all passed on devices that are not simulated.")
    ] = False,
    merged: Annotated[bool, typer.Option("--merge", help="Run nothing; make one matrix of several reports.")] = False,
    junit_to: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")] = None,
    json_to: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is stdout.")] = None,
    html_to: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page, in one file.")] = None,
) -> None:
    """Check every backend here against the reference: values, gradients, layouts, and refusals by name.

    Exit status 0 only if nothing failed, a backend passed something, and all that was named ran. --quick is the
    default.
    """
    backends = tuple(dict.fromkeys(backend or ()))
    asked = _Files(junit_to, json_to, html_to)
    _check_arguments(files or [], merged, named=bool(platform or backends or full))
    _check_folders(asked)
    if merged:
        demand = Demand(hardware=require_hardware)
        found = merge.read(files or [])
    else:
        _check_names(default_registry(), platform, backends)
        demand = Demand(_due(platform), backends, require_hardware)
        found = Merged.of(_run(platform, backends, "full" if full else "quick", json_to == "-"))
    problems = verdict.problems(found, demand)
    _write(found, problems, asked)
    if json_to != "-":
        _show(found, problems)
    if problems:
        raise typer.Exit(1)


def _check_arguments(files: Sequence[Path], merged: bool, named: bool) -> None:
    if merged and not files:
        raise InvalidAttentionInputError("FILE", "none", "reports that `hal-attn verify --json FILE` wrote")
    if files and not merged:
        raise InvalidAttentionInputError("FILE", str(files[0]), "files only with --merge")
    if merged and named:
        raise InvalidAttentionInputError(
            "--merge", "with --platform, --backend or --full", "alone, since nothing is run; give these to each run"
        )


def _check_names(registry: Registry, platform: str | None, backends: Sequence[str]) -> None:
    """Raises InvalidAttentionInputError, with the closest name, for one that nobody has."""
    platforms = [known.name for known in registry.platforms] + [broken.name for broken in registry.broken]
    owner = registry.platform(platform) if platform else None
    known = registry.backend_names if owner is None else [found.name for found in registry.backends_of(owner)]
    asked = [("--platform", platform, platforms)] if platform else []
    for flag, name, allowed in (*asked, *(("--backend", name, known) for name in backends)):
        if name not in allowed:
            raise InvalidAttentionInputError(flag, repr(name), ", ".join(allowed) or "none", closest(name, allowed))


def _due(platform: str | None) -> tuple[str, ...]:
    """The platforms that must run: the one named, or, as a plugin that is installed should load, each broken one."""
    return tuple(broken.name for broken in default_registry().broken) if platform is None else (platform,)


def _check_folders(asked: _Files) -> None:
    """A run may take long; what cannot be written is said before it."""
    files = {"--junit": asked.junit, "--html": asked.html, "--json": None if asked.json in (None, "-") else asked.json}
    for flag, file in files.items():
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise InvalidAttentionInputError(flag, str(file), "a file in a folder that is there")


def _run(platform: str | None, backends: Sequence[str], effort: Effort, quiet: bool) -> Report:
    """One run of the kit for each backend that is named, or one for all, as one report."""
    with _progress(quiet) as tick:
        reports = [run_kit(platform, name, effort=effort, progress=tick) for name in backends or (None,)]
    # Platforms that have none of the backends named were not asked for.
    owners = {found.platform for report in reports for found in report.backends}
    platforms = {
        found.name: found
        for report in reports
        for found in report.platforms
        if not backends or found.name in {platform, *owners}
    }
    return replace(
        reports[0],
        platforms=tuple(platforms.values()),
        backends=tuple(found for report in reports for found in report.backends),
        seconds=sum(report.seconds for report in reports),
    )


@contextmanager
def _progress(quiet: bool) -> Iterator[_Tick]:
    """A bar on stderr while the kit runs; none where nobody would see it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    disable = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=disable) as bar:
        task = bar.add_task("", total=None)
        yield lambda description, done, steps: bar.update(task, description=description, completed=done, total=steps)


def _write(found: Merged, problems: Sequence[str], asked: _Files) -> None:
    if asked.json == "-":
        output.print_json(found.to_dict())
    elif asked.json is not None:
        Path(asked.json).write_text(json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if asked.junit is not None:
        asked.junit.write_text(junit.render(found, problems), encoding="utf-8")
    if asked.html is not None:
        asked.html.write_text(html.render(found, problems), encoding="utf-8")


def _show(found: Merged, problems: Sequence[str]) -> None:
    parts: list[RenderableType] = []
    for label, report in found.machines:
        facts: dict[str, RenderableType] = dict(report.machine)
        facts |= {found.name: found.libraries for found in report.platforms if found.available and found.libraries}
        took = f"{report.effort}, {verdict.checks(len(report.checks))} in {report.seconds:.0f} s"
        parts += [Text(label, style="bold")] if label else []
        parts += [output.fields({**facts, "effort": took}), ""]
        shown = [column for column in found.columns if column.machine == label]
        parts += [_table(shown), ""] if shown else []
    parts += [part for column in found.columns for part in _failures(column)]
    parts += _conflicts(found)
    remarks = [*verdict.simulated(found), *verdict.declared(found), *verdict.not_run(found)]
    parts += [output.bullets(remarks), ""] if remarks else []
    output.show(*parts, _verdict(found, problems))


def _table(shown: Sequence[Column]) -> RenderableType:
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    made.add_column("Backend", overflow="fold")
    made.add_column("Ran on", no_wrap=True)
    for heading in ("Passed", "Failed", "Refused", "Not run", "Error"):
        made.add_column(heading, no_wrap=True, justify="right")
    for column in shown:
        counts = matrix.Cell(column.checks).counts
        state = output.state("SIMULATED") if column.simulated else Text("device")
        failed = Text(f"{counts['failed']:,}", style="bold red" if counts["failed"] else "default")
        others = (f"{counts[status]:,}" for status in ("refused", "not run"))
        error = matrix.percent(matrix.worst(column.checks))
        made.add_row(_place(column, ""), state, f"{counts['passed']:,}", failed, *others, error)
    return made


def _place(column: Column, machine: str) -> str:
    return "/".join(part for part in (machine, column.platform, column.backend) if part)


def _failures(column: Column) -> Iterator[RenderableType]:
    """Each broken rule, with the first check that broke it, and what else did."""
    failed = [reason for reason in matrix.reasons(column.checks) if reason.status == "failed"]
    for reason in failed[:_FAILURES_SHOWN]:
        first = reason.checks[0]
        where = _place(column, column.machine)
        more = f" (and {len(reason.checks) - 1:,} more)" if len(reason.checks) > 1 else ""
        yield Text(f"FAILED {where}, {first.feature}, rule {reason.rule!r}: {first.name}{more}", style="bold red")
        yield output.bullets([text for text in (*reason.message.splitlines(), first.request) if text])
        yield ""
    if len(failed) > _FAILURES_SHOWN:
        yield Text(f"{len(failed) - _FAILURES_SHOWN:,} more reasons of {column.title}: see --html or --json")
        yield ""


def _conflicts(found: Merged) -> Iterator[RenderableType]:
    rows = [
        (
            f"{conflict.platform}/{conflict.backend}",
            conflict.feature,
            "\n".join(f"{v.status} on {v.where}{' (SIMULATED)' if v.simulated else ''}" for v in conflict.verdicts),
        )
        for conflict in found.conflicts
    ]
    if rows:
        yield output.table(("Machines disagree", "Feature", "How it ended"), rows)
        yield ""


def _verdict(found: Merged, problems: Sequence[str]) -> RenderableType:
    headline = html.headline(found)
    if problems:
        return Group(Text(f"{headline}. Not what was asked for:", style="bold red"), output.bullets(problems))
    return Text(f"{headline}.", style="green")
