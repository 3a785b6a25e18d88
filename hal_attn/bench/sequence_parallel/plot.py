"""The time of each way of sharing as a picture: one panel a problem, the ideal as a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hal_attn.bench import pictures
from hal_attn.bench.sequence_parallel.overlap import Interval
from hal_attn.bench.sequence_parallel.row import LOCAL, Row

_COLOURS = {"ours": pictures.OURS, "local": pictures.BARE, "peer": pictures.PEER, "wrong": pictures.WRONG}


def plot(rows: Sequence[Row], ranks: int, title: str, path: Path) -> None:
    """Write the rows as PNG to `path`."""
    panels = [list(found) for _, found in groupby(rows, key=lambda row: (row.problem, row.passes))]
    columns = min(4, math.ceil(math.sqrt(len(panels))))
    lines = -(-len(panels) // columns)
    height = max(len(panel) for panel in panels) * 0.28 + 1.1
    figure = pictures.require_matplotlib().Figure(figsize=(7.5 * columns, height * lines + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=9)
    for place, panel in enumerate(panels):
        _panel(figure.add_subplot(lines, columns, place + 1), panel, ranks)
    pictures.save(figure, path)


def _panel(axes: Any, rows: Sequence[Row], ranks: int) -> None:
    measured = [row for row in rows if row.ms is not None]
    labels = [row.name if row.ideal is None else f"{row.name}  {row.ideal:.2f}" for row in measured]
    places, times = range(len(measured)), [row.ms for row in measured]
    axes.barh(places, times, color=[_colour(row) for row in measured])
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=7)
    base = next((row.ms for row in measured if row.name == LOCAL), None)
    if base is not None:
        axes.axvline(base / ranks, color="black", linewidth=0.8, linestyle="--")
    axes.set_title(f"{rows[0].problem.describe()}\n{rows[0].passes}; ms, and the part of the ideal (line)", fontsize=7)


def _colour(row: Row) -> str:
    if row.wrong:
        return _COLOURS["wrong"]
    return _COLOURS["local" if row.name == LOCAL else "peer" if row.peer else "ours"]


def plot_timeline(transfers: Sequence[Interval], kernels: Sequence[Interval], title: str, path: Path) -> None:
    """Write when transfers and when kernels ran, in microseconds from the first, as PNG to `path`."""
    figure = pictures.require_matplotlib().Figure(figsize=(10, 2.2), layout="constrained")
    axes = figure.add_subplot()
    first = min(start for start, _ in (*transfers, *kernels))
    for place, (found, colour) in enumerate(((kernels, _COLOURS["ours"]), (transfers, _COLOURS["peer"]))):
        axes.broken_barh([(start - first, end - start) for start, end in found], (place - 0.35, 0.7), color=colour)
    axes.set_yticks((0, 1), ("kernels", "transfers"))
    axes.set_xlabel("microseconds", fontsize=8)
    axes.set_title(title, fontsize=8)
    pictures.save(figure, path)
