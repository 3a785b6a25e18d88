"""The costs of calls as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from hal_attn.bench import pictures
from hal_attn.bench.dispatch.run import Row
from hal_attn.bench.machine import headline
from hal_attn.bench.report import Report
from hal_attn.bench.tables import kept, number, table

LEGEND = (
    "us: the host's time of one call, median of rounds in which all calls take turns. Beyond: what it takes beyond the "
    "bare call that it ends in, in the same round. Mark: what Beyond is to stay under."
)


def tables(report: Report) -> Iterator[RenderableType]:
    """One table a kernel."""
    for group, rows in groupby(_rows(report), key=lambda row: row.group):
        yield Text(group, style="bold")
        yield table(("Call", "us", "Beyond", "Mark"), (_cells(row) for row in rows))
        yield ""
    yield LEGEND


def _rows(report: Report) -> list[Row]:
    return [Row(**row) for row in report.rows]


def _cells(row: Row) -> list[RenderableType]:
    mark: RenderableType = ""
    if row.mark is not None and row.over_us is not None:
        mark = kept(f"{row.mark:.2f}", row.over_us <= row.mark)
    beyond = "" if row.over is None else "-" if row.over_us is None else f"{row.over_us:+.2f}"
    return [Text(row.key, style="bold" if row.ours else ""), number(row.us), beyond, mark]


def plot(report: Report, path: Path) -> None:
    """Bars of what each call takes beyond its bare call, a panel a kernel; marks as lines."""
    panels = [
        found
        for _, rows in groupby(_rows(report), key=lambda row: row.group)
        if (found := [row for row in rows if row.over_us is not None])
    ]
    heights = [len(panel) + 1.4 for panel in panels]
    title = "What one call costs on the host, beyond the bare call that it ends in"
    facts = f"{headline(report.facts)}; {report.facts.get('effort', '')}"
    figure = pictures.new_figure(10, 0.36 * sum(heights) + 1.6, title, facts)
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for (panel,), rows in zip(axes, panels, strict=True):
        _panel(panel, rows)
    pictures.save(figure, path)


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    pictures.plain(axes, "x")
    values = [row.over_us or 0.0 for row in rows]
    colours = [pictures.OURS if row.ours else pictures.PEER for row in rows]
    bars = axes.barh(range(len(rows)), [max(value, 0.0) for value in values], color=colours, height=0.7)
    axes.bar_label(bars, [f"{value:+.1f} us" for value in values], padding=4, fontsize=9)
    axes.set_yticks(range(len(rows)), [row.key for row in rows])
    axes.invert_yaxis()
    # Long bars of a peer must not squeeze the short ones to nothing.
    axes.set_xlim(0, max(1.0, *values) * 1.15)
    for place, row in enumerate(rows):
        if row.mark is not None:
            axes.plot([row.mark] * 2, [place - 0.45, place + 0.45], color=pictures.WRONG, linewidth=2.5)
    marked = any(row.mark is not None for row in rows)
    axes.set_title(f"{rows[0].group}{'  (red: the mark)' if marked else ''}", fontsize=10, loc="left")
