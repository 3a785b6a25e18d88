"""`hal-attn bench show`: a file that another command wrote, as a table, as a picture, against an older one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hal_attn.bench.report import read_report
from hal_attn.bench.views import KINDS
from hal_attn.cli.bench import common
from hal_attn.cli.bench.common import Sinks


def show(
    file: Annotated[Path, typer.Argument(help="JSON that a command of `hal-attn bench` wrote.")],
    json_to: common.Json = None,
    plot_to: common.Plot = None,
    compare_to: common.Compare = None,
    slower: common.Slower = 1.10,
    anyway: common.Anyway = False,
) -> None:
    """Show a file that another command of `hal-attn bench` wrote; nothing is measured."""
    sinks = Sinks.checked(json_to, plot_to, compare_to, slower, anyway)
    sinks.take(read_report(file, "FILE", KINDS))
