"""How each kind of report is shown: its tables, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rich.console import RenderableType

from hal_attn.bench.report import Report

# Each module has `tables(report)` and `plot(report, path)`.
_MODULES = {
    "dispatch": "hal_attn.bench.dispatch.view",
    "kernels": "hal_attn.bench.kernels.view",
    "packed": "hal_attn.bench.packed.view",
    "sequence-parallel": "hal_attn.bench.sequence_parallel.view",
}
KINDS = tuple(_MODULES)


@dataclass(frozen=True)
class View:
    """`tables` for a screen of 80 columns; `plot` writes a PNG."""

    tables: Callable[[Report], Iterable[RenderableType]]
    plot: Callable[[Report, Path], None]


def view_of(report: Report) -> View:
    """How this kind is shown."""
    module = import_module(_MODULES[report.kind])
    return View(module.tables, module.plot)
