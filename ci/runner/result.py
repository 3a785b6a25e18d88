"""What a step leaves: how it ended, why, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Status(Enum):
    """How a step ended. Only `FAILED` fails the run; `NOT_RUN` is for what a simulation cannot show."""

    PASSED = "passed"
    FAILED = "FAILED"
    SIMULATED = "SIMULATED"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Result:
    """One step: `summary` is a sentence for the table, `remedy` what to do where it failed, `files` those it left."""

    step: str
    status: Status
    summary: str
    remedy: str = ""
    seconds: float = 0.0
    files: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
