"""Backends and shapes as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from hal_attn.bench import pictures
from hal_attn.bench.kernels.row import MEMORY_MARK, TUNED_MARK, UNTUNED_MARK, Row, from_json
from hal_attn.bench.kernels.shapes import short
from hal_attn.bench.machine import headline
from hal_attn.bench.report import Report
from hal_attn.bench.tables import MEBIBYTE, kept, number, ratio, table

LEGEND = (
    "ms: median of calls in turns. Of best: the time of the fastest as a part of this one's. Vendor: our time as a "
    "multiple of the vendor's own call. Memory: our peak as a multiple of that call's. Error: largest difference from "
    "the oracle at sampled rows. Chosen: what a call takes that names no backend."
)


def tables(report: Report) -> Iterator[RenderableType]:
    """One a shape and pass, then what was chosen, and how near the best it is."""
    groups = _groups(report)
    for rows in groups:
        yield Text(f"{rows[0].problem.describe()}: {rows[0].passes}", style="bold")
        yield _table(rows)
        yield from _notes(rows)
        yield ""
    yield from _summary(groups)
    yield LEGEND


def _groups(report: Report) -> list[list[Row]]:
    rows = [from_json(row) for row in report.rows]
    return [list(found) for _, found in groupby(rows, key=lambda row: (row.problem, row.passes))]


def _table(rows: Sequence[Row]) -> RenderableType:
    memory = any(row.peak is not None for row in rows)
    headings = ["Backend", "ms", "TFLOP/s", "Of best", "Vendor", *(["Memory"] if memory else []), "Error", "Chosen"]
    return table(headings, (_cells(row, rows, memory) for row in rows if row.ms is not None))


def _cells(row: Row, rows: Sequence[Row], memory: bool) -> list[RenderableType]:
    found: list[RenderableType] = [
        row.backend,
        number(row.ms),
        number(row.teraflops),
        ratio(part_of_best(row, rows)),
        ratio(_over(row.ms, row.vendor_ms)),
    ]
    if memory:
        found.append(ratio(_over(row.peak, row.vendor_peak)))
    error = Text("WRONG", style="bold red") if row.wrong else f"{row.error:.0e}" if row.error is not None else "-"
    return [*found, error, Text(_chosen(row), style="bold green")]


def _chosen(row: Row) -> str:
    words = ["untuned"] if row.chosen else []
    if row.tuned is None:
        return "chosen" if row.chosen else ""
    return ", ".join(words + (["tuned"] if row.tuned else []))


def part_of_best(row: Row | None, rows: Sequence[Row]) -> float | None:
    """The fastest time as a part of the row's; None where it has none."""
    times = [other.ms for other in rows if other.ms is not None and not other.wrong]
    if row is None or row.ms is None or not times:
        return None
    return min(times) / row.ms


def _over(ours: float | None, vendor: float | None) -> float | None:
    return ours / vendor if ours is not None and vendor else None


def _notes(rows: Sequence[Row]) -> Iterator[RenderableType]:
    for row in rows:
        if row.refused is not None:
            yield f"not measured, {row.backend}: {row.refused}"
        if row.wrong:
            yield Text(f"{row.backend} WRONG: {row.error:.1e} from the oracle", style="bold red")
        if row.note is not None:
            yield f"{row.backend}: {row.note}"
        memory = _over(row.peak, row.vendor_peak)
        if memory is not None and memory > MEMORY_MARK and row.peak is not None and row.vendor_peak is not None:
            ours, theirs = number(row.peak / MEBIBYTE), number(row.vendor_peak / MEBIBYTE)
            yield f"{row.backend}: {ours} MiB against the vendor's {theirs} MiB, more than {MEMORY_MARK}"


def _summary(groups: Sequence[Sequence[Row]]) -> Iterator[RenderableType]:
    for word, mark in (("untuned", UNTUNED_MARK), ("tuned", TUNED_MARK)):
        cells: list[Sequence[RenderableType]] = []
        for rows in groups:
            picked = next((row for row in rows if (row.chosen if word == "untuned" else row.tuned)), None)
            part = part_of_best(picked, rows)
            if picked is not None and part is not None:
                best = min((row for row in rows if row.ms is not None), key=lambda row: row.ms or 0.0)
                shape = f"{short(rows[0].problem)}{'' if rows[0].passes == 'forward' else ', fwd+bwd'}"
                cells.append((shape, picked.backend, best.backend, kept(f"{part:.2f}", part >= mark)))
        if cells:
            yield Text(f"Chosen {word}; mark: at least {mark:.2f} of the best", style="bold")
            yield table(("Shape", "Chosen", "Best", "Part of the best"), cells)
            yield ""


def plot(report: Report, path: Path) -> None:
    """TFLOP/s of each backend, a group of bars a shape, a panel a pass; what is chosen is marked."""
    passes: dict[str, list[list[Row]]] = {}
    for rows in _groups(report):
        measured = [row for row in rows if row.ms is not None]
        if measured:
            passes.setdefault(rows[0].passes, []).append(measured)
    names = list(dict.fromkeys(row.backend for groups in passes.values() for rows in groups for row in rows))
    colours = dict(zip(names, pictures.COLOURS * 3, strict=False))
    widest = max((sum(len(rows) + 1.5 for rows in groups) for groups in passes.values()), default=8.0)
    width, height = max(9.0, min(19.0, 0.24 * widest + 2)), 0.9 + 4.4 * len(passes)
    dtypes = dict.fromkeys(str(row["problem"]["dtype"]) for row in report.rows)
    facts = f"{headline(report.facts)}; {', '.join(dtypes)}"
    figure = pictures.new_figure(width, height, "Every backend on every shape", facts)
    panels = figure.subplots(max(1, len(passes)), 1, squeeze=False)
    for (axes,), (which, groups) in zip(panels, passes.items(), strict=False):
        _panel(axes, which, groups, colours)
    _legend(panels[0][0], colours, any(row.tuned is not None for g in passes.values() for rows in g for row in rows))
    pictures.save(figure, path)


def _panel(axes: Any, which: str, groups: Sequence[Sequence[Row]], colours: dict[str, str]) -> None:
    pictures.plain(axes, "y")
    top = max(row.teraflops or 0.0 for rows in groups for row in rows)
    unit, scale = ("TFLOP/s", 1.0) if top >= 1 else ("GFLOP/s", 1e3)
    top *= scale
    at, middles, labels = 0.0, [], []
    for rows in groups:
        picked = next((row for row in rows if row.chosen), None)
        part = part_of_best(picked, rows)
        middles.append(at + (len(rows) - 1) / 2)
        labels.append(_label(rows[0], part))
        for row in rows:
            height = (row.teraflops or 0.0) * scale
            axes.bar(
                at, height, width=0.9, color=colours[row.backend], edgecolor=pictures.WRONG if row.wrong else "none"
            )
            if row.chosen:
                axes.plot(at, height + top * 0.025, marker="v", color=pictures.INK, markersize=7)
            if row.tuned:
                axes.plot(at, height + top * 0.065, marker="*", color=pictures.WRONG, markersize=10)
            at += 1
        at += 1.5
    axes.set_xticks(middles, labels, fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-1.2, at - 1.3)
    axes.set_ylim(0, top * 1.12)
    axes.set_ylabel(unit, fontsize=9)
    axes.set_title(which, fontsize=10, loc="left")


def _label(row: Row, part: float | None) -> str:
    words = short(row.problem).split()
    if row.problem.packed:
        break_at = next(place for place, word in enumerate(words) if word.startswith("H"))
        lines = [" ".join(words[1:break_at]), " ".join(words[break_at:])]
        lines = ["packed", *lines]
    else:
        lines = [" ".join(words[:2]), " ".join(words[2:4]), words[4]]
    return "\n".join([*lines, "" if part is None else f"chosen {part:.2f}"])


def _legend(axes: Any, colours: dict[str, str], tuned: bool) -> None:
    for name, colour in colours.items():
        axes.bar(0, 0, color=colour, label=name)
    axes.plot([], [], marker="v", color=pictures.INK, linestyle="none", label="chosen untuned")
    if tuned:
        axes.plot([], [], marker="*", color=pictures.WRONG, linestyle="none", markersize=10, label="chosen tuned")
    axes.legend(loc="lower left", bbox_to_anchor=(0.12, 1.0), ncols=6, fontsize=9, frameon=False)
