"""Packed batches as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from hal_attn.bench import pictures
from hal_attn.bench.machine import headline
from hal_attn.bench.packed.run import MARK, Row
from hal_attn.bench.report import Report
from hal_attn.bench.tables import MEBIBYTE, kept, number, ratio, table

LEGEND = (
    "ms: median of calls in turns. Of best: ms as a multiple of the best other way's than ours. MiB: what the first "
    "call holds beyond its inputs. Difference: the largest from float32, each sequence alone."
)


def tables(report: Report) -> Iterator[RenderableType]:
    """One a batch."""
    for rows in _groups(report):
        first = rows[0]
        yield Text(f"{first.batch}: {first.sequences} sequences, {first.tokens} tokens, {first.backend}", style="bold")
        yield table(("Way", "ms", "Of best", "MiB", "Difference", "Mark"), map(_cells, rows))
        for row in rows:
            if row.refused is not None:
                yield f"not measured, {row.way}: {row.refused}"
        yield ""
    yield LEGEND


def _groups(report: Report) -> list[list[Row]]:
    rows = [Row(**row) for row in report.rows]
    return [list(found) for _, found in groupby(rows, key=lambda row: row.batch)]


def _cells(row: Row) -> list[RenderableType]:
    mark: RenderableType = ""
    if row.ours and row.of_best is not None:
        mark = kept(f"{MARK}", row.of_best <= MARK)
    difference = Text("WRONG", style="bold red") if row.wrong else _short(row.difference)
    peak = None if row.peak is None else row.peak / MEBIBYTE
    name = Text(row.way, style="bold" if row.ours else "")
    return [name, number(row.ms), ratio(row.of_best), number(peak), difference, mark]


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"


def plot(report: Report, path: Path) -> None:
    """Time above and memory below, a panel a batch; the mark as a line."""
    groups = _groups(report)
    memory = any(row.peak is not None for rows in groups for row in rows)
    title = "Packed batches on a backend that knows only batches"
    facts = f"{headline(report.facts, 'shape')}; threads: {report.facts.get('threads', '')}"
    figure = pictures.new_figure(3.4 * len(groups) + 1.6, 5.6 if memory else 3.4, title, facts)
    panels = figure.subplots(2 if memory else 1, len(groups), squeeze=False)
    for place, rows in enumerate(groups):
        measured = [row for row in rows if row.ms is not None]
        top = panels[0][place]
        _bars(top, measured, [row.ms or 0.0 for row in measured], "ms", names=place == 0)
        top.set_title(f"{rows[0].batch}: {rows[0].sequences} sequences, {rows[0].tokens} tokens", fontsize=9)
        best = min((row.ms for row in measured if row.ms is not None and not row.ours), default=None)
        if best is not None:
            top.axvline(best * MARK, color=pictures.WRONG, linewidth=1.5, linestyle="--")
        if memory:
            sizes = [(row.peak or 0.0) / MEBIBYTE for row in measured]
            _bars(panels[1][place], measured, sizes, "MiB", names=place == 0)
    mark = f"the mark: {MARK} of the best other way"
    pictures.legend(figure, {"hal_attn": pictures.OURS, "other ways": pictures.PEER, mark: pictures.WRONG})
    pictures.save(figure, path)


def _bars(axes: Any, rows: Sequence[Row], values: Sequence[float], unit: str, names: bool) -> None:
    pictures.plain(axes, "x")
    colours = [pictures.OURS if row.ours else pictures.PEER for row in rows]
    bars = axes.barh(range(len(rows)), values, color=colours, height=0.7)
    pictures.label(axes, bars, [f"{number(value)} {unit}" for value in values])
    axes.set_yticks(range(len(rows)), [row.way for row in rows] if names else [""] * len(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, max(values, default=1.0) * 1.35 or 1.0)
