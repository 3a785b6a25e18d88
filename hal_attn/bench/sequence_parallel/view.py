"""A report of sequence parallelism as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType

from hal_attn.bench.machine import headline
from hal_attn.bench.report import Report
from hal_attn.bench.sequence_parallel import plot as pictures
from hal_attn.bench.sequence_parallel import table
from hal_attn.bench.sequence_parallel.row import from_json


def tables(report: Report) -> Iterator[RenderableType]:
    """One a problem and pass."""
    yield from table.tables([from_json(row) for row in report.rows])
    yield table.LEGEND


def plot(report: Report, path: Path) -> None:
    """The time of each way of sharing, a panel a problem."""
    rows = [from_json(row) for row in report.rows]
    ranks = int(report.facts["ranks"].partition(",")[0])
    pictures.plot(rows, ranks, f"{headline(report.facts)}; {ranks} ranks", path)
