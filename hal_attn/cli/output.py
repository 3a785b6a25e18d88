"""What the verbs share to print: plain tables that wrap instead of cutting, and JSON.

Colour only repeats what a word says, so nothing is lost in a pipe or under NO_COLOR.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hal_attn.refusal import Refusal

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]

_STYLES = {
    "usable": "green",
    "chosen": "bold green",
    "takes it": "green",
    "SIMULATED": "yellow",
    "not usable": "yellow",
    "refused": "yellow",
    "BROKEN": "bold red",
    "WRONG": "bold red",
    "UNKNOWN": "bold red",
}


def show(*parts: RenderableType) -> None:
    """Print `parts` on stdout, one under another, without blanks at line ends. Nothing is read as markup."""
    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    text = "\n".join(line.rstrip() for line in captured.get().split("\n"))
    # A device's name must not end the program where the locale cannot print it.
    typer.echo(text.encode(console.encoding, "replace").decode(console.encoding), nl=False)


def print_json(value: object) -> None:
    """`value` as JSON on stdout, keys in the order given."""
    typer.echo(json.dumps(value, indent=2))


def state(word: str) -> Text:
    """A state, in the colour of its kind."""
    return Text(word, style=_STYLES.get(word, "default"))


def table(headings: Sequence[str], rows: Iterable[Sequence[RenderableType]], leading: int = 0) -> Table:
    """A table with a rule under its headings and `leading` empty lines between rows. The last column wraps; the others
    are short and keep their width."""
    made = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        header_style="bold",
        padding=(0, 2, 0, 0),
        leading=leading,
    )
    for heading in headings[:-1]:
        made.add_column(heading, no_wrap=True)
    made.add_column(headings[-1], overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def fields(rows: Mapping[str, RenderableType]) -> Table:
    """Names beside values; a long value wraps under itself."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(state(name), value)
    return grid


def bullets(items: Sequence[RenderableType]) -> RenderableType:
    """Items behind dashes, nothing where there are none; a long one wraps under itself."""
    if not items:
        return ""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for item in items:
        grid.add_row("-", item)
    return grid


def refusal(reason: Refusal, advice: str = "", label: str = "hint") -> RenderableType:
    """A refusal for a person, and under it what helps, where something does."""
    broken = Text(f"{reason.rule}: have {reason.have}, need {reason.need}")
    return Group(broken, Text(f"{label}: {advice}", style="bold")) if advice else broken
