"""A report, or several merged, as one self-contained page: no script, no request, light and dark.

The template has the layout; this module says what stands in it. Everything is escaped by jinja2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import jinja2

from hal_attn.testing import matrix, verdict
from hal_attn.testing.features import RULES
from hal_attn.testing.matrix import Cell, Column, Reason
from hal_attn.testing.merge import Merged
from hal_attn.testing.report import STATUSES

# Upper ends of the steps of the heat map, as parts of the error that is allowed.
HEAT = (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)
_REQUESTS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Box:
    """One cell of the two matrices; `anchor` leads to its reasons, empty where there are none."""

    cell: Cell
    anchor: str

    @property
    def note(self) -> str:
        """How many checks; where they did not end alike, how many of them ended as the cell says."""
        whole, alike = len(self.cell.checks), self.cell.counts[self.cell.status]
        if not whole:
            return ""
        return verdict.checks(whole) if alike == whole else f"{alike:,} of {whole:,}"

    @property
    def heat(self) -> str:
        """The step of the heat map: its place in `HEAT`, "over", or empty where no error was measured."""
        share = self.cell.share
        if self.cell.status == "failed":
            return "over"
        if share is None:
            return ""
        return next((str(place) for place, end in enumerate(HEAT) if share <= end), "over")


@dataclass(frozen=True, slots=True)
class Group:
    """What one cell has to explain."""

    feature: str
    anchor: str
    box: Box
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """One column of the matrices, and its part of the reasons; `starts` a platform of a machine."""

    column: Column
    anchor: str
    starts: bool
    boxes: tuple[Box, ...]
    groups: tuple[Group, ...]
    only_peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands above the columns of one platform of one machine."""

    platform: str
    machine: str
    simulated: bool
    width: int


def render(merged: Merged, problems: Sequence[str] = ()) -> str:
    """The page, as HTML.

    Args:
        merged: what was found; one report alone by `Merged.of`.
        problems: why this is not what was asked for, from `verdict.problems`.
    """
    names = matrix.features(merged.columns)
    shown = _shown(merged, names)
    # A platform's own few rules would leave its column empty; what they found stands with the reasons.
    backends = tuple(part for part in shown if part.column.backend)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hal_attn.testing"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": matrix.percent, "slug": _slug, "checks": verdict.checks}
    return environment.get_template("report.html").render(
        merged=merged,
        headline=headline(merged),
        problems=problems,
        simulated=verdict.simulated(merged),
        declared=verdict.declared(merged),
        not_run=verdict.not_run(merged),
        features=names,
        explained=shown,
        shown=backends,
        headings=_headings(backends),
        rules=RULES,
        steps=_steps(),
        requests_shown=_REQUESTS_SHOWN,
        statuses=STATUSES,
    )


def headline(merged: Merged) -> str:
    """The result in one line; what was simulated is part of it."""
    counts = merged.counts
    ran = {(column.platform, column.backend, column.simulated) for column in merged.columns if column.backend}
    number = sum(simulated for _, _, simulated in ran)
    kind = "" if not number else ", all SIMULATED" if number == len(ran) else f", {number} of them SIMULATED"
    machines = f" on {len(merged.machines)} machines" if len(merged.machines) > 1 else ""
    where = f"{len(ran)} backend{'s' if len(ran) != 1 else ''}{machines}{kind}"
    if counts["failed"]:
        verb = "fails" if counts["failed"] == 1 else "fail"
        return f"{verdict.checks(counts['failed'])} {verb}; checked: {where}"
    if not counts["passed"]:
        return "Nothing was shown: no check passed"
    return f"Nothing fails: {verdict.checks(counts['passed'])} passed; checked: {where}"


def _shown(merged: Merged, names: Sequence[str]) -> tuple[Shown, ...]:
    peers = {
        (label, backend.platform, backend.name): backend.coverage.only_peers
        for label, report in merged.machines
        for backend in report.backends
    }
    found: list[Shown] = []
    for number, column in enumerate(merged.columns):
        before = found[-1].column if found else None
        here = (column.machine, column.platform)
        starts = before is None or not before.backend or (before.machine, before.platform) != here
        cells = zip(names, column.cells(names), strict=True)
        groups = [_group(f"b{number}-{_slug(name)}", name, cell) for name, cell in cells]
        only_peers = peers.get((column.machine, column.platform, column.backend), ())
        boxes = tuple(group.box for group in groups)
        explained = tuple(group for group in groups if group.reasons)
        found.append(Shown(column, f"b{number}", starts, boxes, explained, only_peers))
    return tuple(found)


def _group(anchor: str, feature: str, cell: Cell) -> Group:
    found = matrix.reasons(cell.checks)
    return Group(feature, anchor, Box(cell, anchor if found else ""), found)


def _headings(shown: Sequence[Shown]) -> tuple[Heading, ...]:
    runs = groupby(shown, key=lambda part: (part.column.platform, part.column.machine, part.column.simulated))
    return tuple(Heading(*key, len(list(run))) for key, run in runs)


def _steps() -> tuple[tuple[str, str], ...]:
    """(step, what it means) for the legend of the heat map."""
    ends = [f"{end:.0%}".replace("%", " %") for end in HEAT]
    return (*((str(place), f"to {end}") for place, end in enumerate(ends)), ("over", "failed"))


def _slug(text: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in text.lower()).split())
