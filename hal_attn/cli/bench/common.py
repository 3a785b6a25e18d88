"""What the commands of `hal-attn bench` share: flags, the bar, and what is done with a report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from hal_attn.bench.compare import Comparison, compare
from hal_attn.bench.machine import SIMULATED
from hal_attn.bench.pictures import require_matplotlib
from hal_attn.bench.report import Report, read_report
from hal_attn.bench.tables import number, table
from hal_attn.bench.views import KINDS, view_of
from hal_attn.cli import output
from hal_attn.errors import InvalidAttentionInputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Device = Annotated[str | None, typer.Option(metavar="NAME", help="cuda, cpu; the accelerator, else cpu.")]
Dtype = Annotated[str | None, typer.Option(metavar="|".join(DTYPES), help="By the device if not given.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is stdout.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture, as PNG.")]
Compare = Annotated[
    Path | None, typer.Option("--compare", metavar="FILE", help="An older JSON: show ratios, fail where slower.")
]
Slower = Annotated[float, typer.Option(min=1.0, metavar="RATIO", help="What counts as slower.")]
Anyway = Annotated[bool, typer.Option("--anyway", help="Compare although machine or versions differ.")]
Quick = Annotated[bool, typer.Option("--quick", help="A moment's work, to see that it runs; rough times.")]

QUICK = "--quick: few samples; times are rough, and no mark means anything"

Tick = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Sinks:
    """Where a report goes. Made before anything is measured, so that what is wrong is said first.

    Raises:
        InvalidAttentionInputError: the older file is none.
        MissingPlotLibraryError: a picture is asked for, without matplotlib.
    """

    json_to: str | None
    plot_to: Path | None
    older: Report | None
    slower: float
    anyway: bool

    @classmethod
    def checked(
        cls, json_to: str | None, plot_to: Path | None, compare_to: Path | None, slower: float, anyway: bool
    ) -> Sinks:
        """As the flags say."""
        if plot_to is not None:
            require_matplotlib()
            _check_folder("--plot", plot_to)
        if json_to not in (None, "-"):
            _check_folder("--json", Path(str(json_to)))
        older = None if compare_to is None else read_report(compare_to, "--compare", KINDS)
        return cls(json_to, plot_to, older, slower, anyway)

    @property
    def quiet(self) -> bool:
        """Whether stdout is for JSON alone."""
        return self.json_to == "-"

    def take(self, report: Report, quick: bool = False) -> None:
        """Show and write it, with a note where its times are rough, being those of `--quick`.

        Raises:
            typer.Exit: with 1 where something of ours is wrong, or slower than in the older file.
            InvalidAttentionInputError: the older file is of something else, or from elsewhere.
        """
        if quick:
            report = replace(report, notes=(QUICK, *report.notes))
        if self.json_to not in (None, "-"):
            Path(str(self.json_to)).write_text(report.json() + "\n", encoding="utf-8")
        if self.plot_to is not None:
            view_of(report).plot(report, self.plot_to)
        if self.quiet:
            typer.echo(report.json())
        else:
            output.show(output.fields(dict(report.facts)), "", *_warning(report), *view_of(report).tables(report))
            output.show(*report.notes)
        ok = report.ok
        if self.older is not None:
            found = compare(report, self.older, self.slower, self.anyway)
            ok = ok and found.ok
            if not self.quiet:
                output.show("", *_compared(found, report.measure))
            elif not found.ok:
                slower = [change.key for change in found.changes if found.is_slower(change)]
                typer.echo(f"hal-attn: slower than {self.slower}: {'; '.join(slower)}", err=True)
        if not ok:
            raise typer.Exit(1)


def _check_folder(flag: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise InvalidAttentionInputError(flag, str(path), "a file in a folder that is there")


def _warning(report: Report) -> Iterator[RenderableType]:
    if SIMULATED in report.facts.get("device", ""):
        yield Text(f"{SIMULATED}: these kernels stand in for a vendor's on the CPU; the times mean nothing.", "yellow")
        yield ""


def _compared(found: Comparison, measure: str) -> Iterator[RenderableType]:
    yield Text(f"Against the older file, in {measure}; slower is above {found.slower:.2f}", style="bold")
    for difference in found.differences:
        yield Text(f"not the same: {difference}", style="yellow")
    rows: list[tuple[RenderableType, ...]] = []
    for change in found.changes:
        word = "slower" if found.is_slower(change) else ""
        told = "-" if change.ratio is None else f"{change.ratio:.2f}"
        rows.append((change.key, number(change.old), number(change.new), told, Text(word, style="bold red")))
    yield table(("Row", "Then", "Now", "Ratio", ""), rows)
    slower = sum(map(found.is_slower, found.changes))
    yield f"{slower} of {sum(change.ours for change in found.changes)} of ours slower." if slower else "None slower."


@contextmanager
def progress(hidden: bool) -> Iterator[Tick]:
    """A bar on stderr while it runs; none where nobody would see it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    disable = hidden or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=disable) as bar:
        task = bar.add_task("", total=None)
        yield lambda description, done, steps: bar.update(task, description=description, completed=done, total=steps)


def find_dtype(name: str | None, usual: str) -> torch.dtype:
    """The dtype asked for.

    Raises:
        InvalidAttentionInputError: none that is measured.
    """
    if (name or usual) not in DTYPES:
        raise InvalidAttentionInputError("--dtype", repr(name), " or ".join(DTYPES))
    return DTYPES[name or usual]
