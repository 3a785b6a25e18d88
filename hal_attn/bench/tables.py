"""What the tables of all measurements share: numbers to the right, three digits that count, marks in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

MEBIBYTE = 2**20


def number(value: float | None) -> str:
    """At most 7 characters: three digits that count, more where they are before the point."""
    if value is None:
        return "-"
    if value >= 100 or value == 0:
        return f"{value:.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def ratio(value: float | None) -> str:
    """Two digits behind the point."""
    return "-" if value is None else f"{value:.2f}"


def kept(text: str, is_kept: bool) -> Text:
    """A mark, and whether it is kept, in a word and its colour."""
    return Text(f"{text} kept", style="green") if is_kept else Text(f"{text} missed", style="bold yellow")


def table(headings: Sequence[str], rows: Iterable[Sequence[RenderableType]]) -> Table:
    """The first column to the left, which wraps where there is too little room; the others numbers, to the right."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        made.add_column(heading, no_wrap=place > 0, overflow="fold", justify="right" if place else "left")
    for row in rows:
        made.add_row(*row)
    return made
