"""The measurement: every batch, every way, time and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from hal_attn.bench.machine import facts
from hal_attn.bench.packed.cell import Cell, in_process
from hal_attn.bench.packed.ways import ROUTE, WAYS
from hal_attn.bench.report import Report

KIND = "packed"
MARK = 1.1
# A few roundings of numbers of size 1 to 4; beyond it a way is wrong.
_TOLERANCE = {"float32": 1e-4, "float16": 2**-7, "bfloat16": 2**-4}
Tick = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Row:
    """What one way costs for one batch.

    Attributes:
        ms: the median of calls in turns.
        of_best: `ms` as a multiple of the best other way's than ours; its mark is `MARK`.
        peak: bytes that the first call holds beyond its inputs.
        difference: the largest from float32, each sequence alone; `wrong` where rounding does not explain it.
        refused: why it was not measured.
    """

    key: str
    ours: bool
    batch: str
    way: str
    backend: str
    sequences: int
    tokens: int
    ms: float | None = None
    of_best: float | None = None
    peak: float | None = None
    difference: float | None = None
    wrong: bool = False
    refused: str | None = None


def measure(batches: Mapping[str, tuple[int, ...]], like: Cell, memory: bool, tick: Tick) -> Report:
    """Every batch, with all else as in `like`."""
    rows: list[Row] = []
    notes: list[str] = []
    apart = memory and torch.device(like.device).type == "cpu"
    steps = len(batches) * (1 + (len(WAYS) if apart else 0))
    done = 0
    for name, lengths in batches.items():
        cell = replace(like, lengths=lengths, memory=memory)
        tick(f"{name}: time", done, steps)
        found = in_process(cell)
        done += 1
        if not found["batched_only"]:
            notes.append(f"{name}: {found['backend']} has a packed kernel of its own, so the padded route is not taken")
        own = _rows(name, lengths, cell.dtype, found)
        for row in own:
            if apart:
                tick(f"{name}: memory of {row.way}", done, steps)
                done += 1
                if row.ms is not None:
                    row = replace(row, peak=in_process(replace(cell, way=row.way))["peak"])
            rows.append(row)
    tick("done", steps, steps)
    shape = f"{like.heads} heads of {like.head_dim}, {like.dtype}"
    told = facts(torch.device(like.device), threads=f"{like.threads} of PyTorch on the CPU", shape=shape)
    ok = not any(row.wrong for row in rows)
    return Report(KIND, "ms", told, tuple(asdict(row) for row in rows), tuple(notes), ok)


def _rows(name: str, lengths: tuple[int, ...], dtype: str, found: dict[str, dict[str, dict[str, float]]]) -> list[Row]:
    ways = found["ways"]
    best = min((told["ms"] for way, told in ways.items() if way != ROUTE and "ms" in told), default=None)
    rows = []
    for way, told in ways.items():
        ms, difference = told.get("ms"), told.get("difference")
        rows.append(
            Row(
                f"{name}: {way}",
                way == ROUTE,
                name,
                way,
                str(found["backend"]),
                len(lengths),
                sum(lengths),
                ms,
                None if ms is None or best is None else ms / best,
                told.get("peak"),
                difference,
                difference is not None and not difference <= _TOLERANCE[dtype],
                None if ms is not None else str(told.get("failed")),
            )
        )
    return rows
