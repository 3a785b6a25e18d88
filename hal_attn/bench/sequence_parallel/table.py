"""Rows as tables for a screen of 80 columns: one a problem, refusals and their reasons beneath."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hal_attn.bench.sequence_parallel.row import LOCAL, Row
from hal_attn.bench.tables import MEBIBYTE, number

COLUMNS = ("Mode", "ms", "Ideal", "TFLOP/s", "Sent", "Least", "Peak", "Error")
LEGEND = (
    "ms: median of repeats, the slowest rank. Ideal: one rank's time / ranks / ms. TFLOP/s: of each rank. "
    "Sent: MiB that a rank sends a call, mean of the ranks; Least: this, as a multiple of the least possible for the "
    "mode. Peak: MiB beyond the inputs. Error: largest difference from one rank's result."
)


def tables(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """For each problem and pass a heading, a table, and notes."""
    for (problem, passes), found in groupby(rows, key=lambda row: (row.problem, row.passes)):
        group = list(found)
        yield Text(f"{problem.describe()}: {passes}", style="bold")
        yield Text(f"kernel: {group[0].backend}")
        yield table(group)
        yield from _notes(group)
        yield ""


def table(rows: Sequence[Row]) -> Table:
    """The columns of `COLUMNS`."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for heading in COLUMNS:
        made.add_column(heading, no_wrap=True, justify="left" if heading == "Mode" else "right")
    for row in rows:
        made.add_row(row.name, *_cells(row))
    return made


def _cells(row: Row) -> list[RenderableType]:
    if row.refused is not None:
        return [Text("refused", style="yellow")]
    error = "-" if row.error is None else f"{row.error:.0e}"
    return [
        number(row.ms),
        "-" if row.ideal is None else f"{row.ideal:.2f}",
        number(row.teraflops),
        "-" if row.sent is None else number(row.sent / MEBIBYTE),
        f"{row.sent / row.least:.2f}" if row.sent is not None and row.least else "-",
        "-" if row.peak is None else number(row.peak / MEBIBYTE),
        Text("WRONG", style="bold red") if row.wrong else error,
    ]


def _notes(rows: Sequence[Row]) -> Iterator[RenderableType]:
    exact = [row for row in rows if row.exact_error is not None and not row.peer]
    others = [row for row in exact if row.name != LOCAL]
    if exact:
        local = f"Against float32 at sampled rows: one rank {exact[0].exact_error:.1e}"
        worst = max(others, key=lambda row: row.exact_error or 0.0, default=None)
        yield Text(local if worst is None else f"{local}, at most {worst.exact_error:.1e} shared ({worst.name}).")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.refused is not None:
            reasons.setdefault(row.refused, []).append(row.name)
    for reason, names in reasons.items():
        yield Text(f"refused, {', '.join(names)}: {reason}")
    for row in rows:
        if not row.peer and row.backend not in ("", rows[0].backend):
            yield Text(f"{row.name}: kernel {row.backend}, as {rows[0].backend} refuses one of its calls")
        if row.wrong:
            yield Text(f"{row.name} WRONG: {row.error:.1e} from one rank's result", style="bold red")
        if row.host_waits:
            yield Text(f"{row.name}: the host waits for the device {row.host_waits} times a call")
