"""What reports say about each feature of each backend: the columns and cells that tables and pages show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hal_attn.testing.features import FEATURES
from hal_attn.testing.report import Check, Report, Status, count

ITSELF = "the platform itself"


@dataclass(frozen=True, slots=True)
class Cell:
    """The checks of one feature on one backend; none where the kit did not get to it."""

    checks: tuple[Check, ...] = ()

    @property
    def counts(self) -> dict[Status, int]:
        """How many checks ended how; each status has an entry."""
        return count(self.checks)

    @property
    def status(self) -> Status:
        """One failure fails the cell; what passed outweighs what was refused, as most features have limits."""
        found = self.counts
        order: tuple[Status, ...] = ("failed", "passed", "refused")
        return next((status for status in order if found[status]), "not run")

    @property
    def share(self) -> float | None:
        """The largest error as a part of what is allowed, as `worst`."""
        return worst(self.checks)


@dataclass(frozen=True, slots=True)
class Column:
    """One backend on one platform of one machine, or the platform itself (`backend` is empty)."""

    machine: str
    platform: str
    backend: str
    simulated: bool
    checks: tuple[Check, ...]

    @property
    def title(self) -> str:
        """The backend's name for a person."""
        return self.backend or ITSELF

    def cells(self, features: Sequence[str]) -> tuple[Cell, ...]:
        """One cell for each of `features`."""
        found: dict[str, list[Check]] = {feature: [] for feature in features}
        for check in self.checks:
            found[check.feature].append(check)
        return tuple(Cell(tuple(checks)) for checks in found.values())


@dataclass(frozen=True, slots=True)
class Reason:
    """Checks that ended the same way under the same rule for the same reason, in the order they ran."""

    status: Status
    rule: str
    message: str
    checks: tuple[Check, ...]


def columns(machine: str, report: Report) -> tuple[Column, ...]:
    """What ran on one machine, platform by platform. What is not available has no column."""
    found: list[Column] = []
    for platform in report.platforms:
        if platform.checks:
            found.append(Column(machine, platform.name, "", platform.simulated, platform.checks))
        found += [
            Column(machine, backend.platform, backend.name, backend.simulated, backend.checks)
            for backend in report.backends
            if backend.platform == platform.name and backend.available
        ]
    return tuple(found)


def features(shown: Iterable[Column]) -> tuple[str, ...]:
    """The features of the kit in its order, looked at or not, and behind them those that only a check names."""
    return tuple(dict.fromkeys((*FEATURES, *(check.feature for column in shown for check in column.checks))))


def worst(checks: Iterable[Check]) -> float | None:
    """The largest error as a part of what is allowed (1.0 is all of it); infinite where none is allowed and there is
    one; None where nothing was measured."""
    pairs = [(check.error, check.allowed) for check in checks]
    return max((_share(error, allowed) for error, allowed in pairs if error is not None), default=None)


def _share(error: float, allowed: float | None) -> float:
    if error == 0:
        return 0.0
    return error / allowed if allowed else math.inf


def percent(share: float | None) -> str:
    """A share for a person: "-" where there is none."""
    if share is None:
        return "-"
    if math.isinf(share):
        return "over"
    if 0 < share < 0.01:
        return "< 1 %"
    return f"{share:.0%}".replace("%", " %") if share < 10 else f"{share:,.0f} ×"


def reasons(checks: Sequence[Check]) -> tuple[Reason, ...]:
    """Why checks failed, were refused or did not run: equal reasons together, failures first."""
    found: dict[tuple[Status, str, str], list[Check]] = {}
    order: tuple[Status, ...] = ("failed", "refused", "not run")
    for status in order:
        for check in checks:
            if check.status == status:
                found.setdefault((status, check.rule, check.message), []).append(check)
    return tuple(Reason(*key, tuple(equal)) for key, equal in found.items())
