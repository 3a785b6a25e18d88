"""One line of the answer: what one backend does with one shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hal_attn.bench.kernels.shapes import short
from hal_attn.bench.problem import Problem, problem_from_json

FORWARD, BOTH = "forward", "forward+backward"
# Operations of the backward pass: five products against two.
OPERATIONS = {FORWARD: 1.0, BOTH: 3.5}
UNTUNED_MARK, TUNED_MARK, MEMORY_MARK = 0.90, 0.98, 1.05


@dataclass(frozen=True)
class Row:
    """What one backend does with one shape; None is not known. Times in ms, medians; sizes in bytes.

    Attributes:
        ms: a call of `hal_attn` with this backend.
        teraflops: per second, counting the pairs that are seen.
        vendor_ms: the vendor's own call that it ends in, on the tensors that the adapter passed.
        chosen, tuned: it is what a call takes that names no backend, without and with HAL_ATTN_AUTOTUNE; `tuned` is
            None where that was not asked for.
        peak, vendor_peak: memory that a call holds at most beyond its inputs, ours and the vendor's own.
        error: the largest difference of the output from the oracle at sampled rows, and with the backward pass that of
            the gradient of query there.
        wrong: the error is beyond what rounding explains.
        failed: it took the call and then raised.
        refused: why nothing was measured; `note`: what a reader should know besides.
    """

    problem: Problem
    backend: str
    passes: str
    refused: str | None = None
    ms: float | None = None
    teraflops: float | None = None
    vendor_ms: float | None = None
    chosen: bool = False
    tuned: bool | None = None
    peak: float | None = None
    vendor_peak: float | None = None
    error: float | None = None
    wrong: bool = False
    failed: bool = False
    note: str | None = None

    @property
    def key(self) -> str:
        """Unique in a measurement."""
        dtype = str(self.problem.dtype).removeprefix("torch.")
        lengths = f" [{','.join(map(str, self.problem.lengths))}]" if self.problem.packed else ""
        return f"{short(self.problem)}{lengths} {dtype} {self.passes}: {self.backend}"


def as_json(row: Row) -> dict[str, Any]:
    """For a file."""
    problem = {**asdict(row.problem), "dtype": str(row.problem.dtype).removeprefix("torch.")}
    values = {name: value for name, value in asdict(row).items() if name != "problem"}
    return {"key": row.key, "ours": True, "problem": problem, **values}


def from_json(row: Mapping[str, Any]) -> Row:
    """The row that `as_json` wrote."""
    values = {name: value for name, value in row.items() if name not in ("key", "ours", "problem")}
    return Row(problem=problem_from_json(row["problem"]), **values)
