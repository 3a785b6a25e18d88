"""Reports of several machines as one: who ran what, and where the machines disagree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hal_attn.errors import InvalidAttentionInputError
from hal_attn.testing import matrix
from hal_attn.testing.matrix import Column
from hal_attn.testing.report import FORMAT, Report, Status, count
from hal_attn.written import CONFORMANCE, kind_of

# `ci/run` writes a file of this name on each machine.
_OF_EVERY_MACHINE = "conformance"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one feature ended on one machine; `libraries` as `PlatformReport.libraries`."""

    machine: str
    simulated: bool
    status: Status
    libraries: str

    @property
    def where(self) -> str:
        """The machine for a person, with the libraries that may make the difference."""
        return f"{self.machine}, {self.libraries}" if self.libraries else self.machine


@dataclass(frozen=True, slots=True)
class Conflict:
    """One feature of one backend that did not end alike everywhere."""

    platform: str
    backend: str
    feature: str
    verdicts: tuple[Verdict, ...]

    @property
    def failed(self) -> bool:
        """It failed somewhere; else it is only refused by some."""
        return any(verdict.status == "failed" for verdict in self.verdicts)


@dataclass(frozen=True, slots=True)
class Merged:
    """Reports by the label of their machine, in the order given. One report alone has one with an empty label."""

    machines: tuple[tuple[str, Report], ...]

    @classmethod
    def of(cls, report: Report) -> Merged:
        """One report alone."""
        return cls((("", report),))

    @property
    def columns(self) -> tuple[Column, ...]:
        """Every backend that ran, machine by machine."""
        return tuple(column for label, report in self.machines for column in matrix.columns(label, report))

    @property
    def counts(self) -> dict[Status, int]:
        """How many checks of all machines ended how; each status has an entry."""
        return count(check for _, report in self.machines for check in report.checks)

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Where one backend passed on one machine what it failed or refused on another, failures first. What did not
        run says nothing and is in no conflict."""
        shown = self.columns
        libraries = {(label, each.name): each.libraries for label, report in self.machines for each in report.platforms}
        names = matrix.features(shown)
        found: dict[tuple[str, str, str], list[Verdict]] = {}
        for column in shown:
            for feature, cell in zip(names, column.cells(names), strict=True):
                if cell.status != "not run":
                    beside = libraries[column.machine, column.platform]
                    verdict = Verdict(column.machine, column.simulated, cell.status, beside)
                    found.setdefault((column.platform, column.backend, feature), []).append(verdict)
        differing = [
            Conflict(*key, tuple(verdicts))
            for key, verdicts in found.items()
            if len({verdict.status for verdict in verdicts}) > 1
        ]
        return tuple(sorted(differing, key=lambda conflict: not conflict.failed))

    def to_dict(self) -> dict[str, Any]:
        """As plain dicts and lists; one report alone is as `Report.to_dict`."""
        if [label for label, _ in self.machines] == [""]:
            return self.machines[0][1].to_dict()
        return {
            "format": FORMAT,
            "ok": all(report.ok for _, report in self.machines),
            "counts": self.counts,
            "conflicts": [
                {
                    "platform": conflict.platform,
                    "backend": conflict.backend,
                    "feature": conflict.feature,
                    "verdicts": [
                        {"machine": v.machine, "simulated": v.simulated, "status": v.status} for v in conflict.verdicts
                    ],
                }
                for conflict in self.conflicts
            ],
            "machines": [{"label": label, "report": report.to_dict()} for label, report in self.machines],
        }


def read(files: Sequence[Path]) -> Merged:
    """The reports of these files, each under the name of its file without the ending; merged files may be among them.

    A name that several files have, or that `ci/run` gives every report, says nothing about the machine: such a report
    is under the name of its folder.

    Raises:
        InvalidAttentionInputError: a file cannot be read, or is no report.
    """
    machines: list[tuple[str, Report]] = []
    stems = Counter(file.stem for file in files)
    for file in files:
        telling = stems[file.stem] == 1 and file.stem != _OF_EVERY_MACHINE
        name = file.stem if telling else file.absolute().parent.name or file.stem
        for label, report in _machines(file, name):
            taken = {other for other, _ in machines}
            numbered = (f"{label} ({number})" for number in range(2, len(taken) + 3))
            machines.append((next(name for name in (label, *numbered) if name not in taken), report))
    return Merged(tuple(machines))


def _machines(file: Path, name: str) -> list[tuple[str, Report]]:
    try:
        text = file.read_text(encoding="utf-8")
        data = json.loads(text)
        if (kind := kind_of(data)) != CONFORMANCE:
            raise ValueError(f"this is {kind}")
        if "machines" in data:
            return [(str(part["label"]), Report.from_json(json.dumps(part["report"]))) for part in data["machines"]]
        return [(name, Report.from_json(text))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        allowed = "reports that `hal-attn verify --json FILE` wrote"
        remedy = f"A run of ci/run leaves one as {_OF_EVERY_MACHINE}.json"
        raise InvalidAttentionInputError("FILE", f"{file} ({reason})", allowed, remedy) from error
