"""One line of the answer: what one way of sharing costs for one problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hal_attn.bench.problem import Problem, problem_from_json

FORWARD, BOTH = "forward", "forward+backward"
LOCAL = "local"
# Operations of the backward pass: five products against two.
OPERATIONS = {FORWARD: 1.0, BOTH: 3.5}


@dataclass(frozen=True)
class Row:
    """What one way of sharing costs for one problem; None is not known. Times in ms, sizes in bytes.

    Attributes:
        alone: time of one rank with the whole problem, measured in turns with `ms`.
        ideal: part of the ideal that is reached, the ideal being `alone` divided by the ranks.
        teraflops: of each rank, per second, counting the pairs that are seen.
        sent, least: by a rank for one attention, and the least for this mode; the mean of the ranks.
        peak: memory of a call beyond its inputs, the largest of the ranks.
        error: the largest difference from one rank's result, of the gradients too where there are any.
        exact_error: the largest difference of the output from float32 at sampled rows.
        wrong: the error is beyond what rounding explains.
        host_waits: times the host waits for the device in one call.
        refused: why nothing was measured.
    """

    problem: Problem
    name: str
    peer: bool
    backend: str
    passes: str
    refused: str | None = None
    ms: float | None = None
    alone: float | None = None
    ideal: float | None = None
    teraflops: float | None = None
    sent: float | None = None
    least: float | None = None
    peak: float | None = None
    error: float | None = None
    exact_error: float | None = None
    wrong: bool = False
    host_waits: int | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing of ours is wrong or waits."""
        return self.peer or not (self.wrong or self.host_waits)


def as_json(row: Row) -> dict[str, Any]:
    """For a file: plain values, and what every report has of a row."""
    problem = {**asdict(row.problem), "dtype": str(row.problem.dtype).removeprefix("torch.")}
    values = {name: value for name, value in asdict(row).items() if name != "problem"}
    key = f"{row.problem.describe()}: {row.passes}, {row.name}"
    return {"key": key, "ours": not row.peer, "problem": problem, **values}


def from_json(row: Mapping[str, Any]) -> Row:
    """The row that `as_json` wrote."""
    values = {name: value for name, value in row.items() if name not in ("key", "ours", "problem")}
    return Row(problem=problem_from_json(row["problem"]), **values)
