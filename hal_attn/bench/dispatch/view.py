"""The costs of calls as tables and as a picture."""

from __future__ import annotations

import statistics
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

_CUT = 8
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
    peers = [part for part in report.facts["versions"].split(", ") if part.startswith(("diffusers ", "transformers "))]
    facts = "; ".join([headline(report.facts, "effort"), *peers])
    figure = pictures.new_figure(10, 0.36 * sum(heights) + 1.6, title, facts)
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for (panel,), rows in zip(axes, panels, strict=True):
        _panel(panel, rows)
    pictures.legend(figure, {"hal_attn": pictures.OURS, "others": pictures.PEER, "the mark": pictures.WRONG})
    pictures.save(figure, path)


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    pictures.plain(axes, "x")
    values = [row.over_us or 0.0 for row in rows]
    # One long bar must not squeeze the others to nothing: it is cut, and its label says how long it is.
    usual = statistics.median([value for value in values if value > 0] or [0.0])
    limit = max(1.0, min(max(values), _CUT * usual))
    colours = [pictures.OURS if row.ours else pictures.PEER for row in rows]
    shown = [min(max(value, 0.0), limit) for value in values]
    bars = axes.barh(range(len(rows)), shown, color=colours, height=0.7)
    labels = [f"{value:+.1f} us" + (", cut" if value > limit else "") for value in values]
    pictures.label(axes, bars, labels)
    axes.set_yticks(range(len(rows)), [row.key for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, limit * 1.18)
    for place, row in enumerate(rows):
        if row.mark is not None:
            axes.plot([row.mark] * 2, [place - 0.45, place + 0.45], color=pictures.WRONG, linewidth=2.5)
    axes.set_title(rows[0].group, fontsize=10, loc="left")
