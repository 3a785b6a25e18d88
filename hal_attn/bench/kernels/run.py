"""The measurement: every shape, every pass, every backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory

import torch

from hal_attn.bench.kernels.measure import Bench, Wanted
from hal_attn.bench.kernels.row import Row, as_json
from hal_attn.bench.kernels.shapes import short
from hal_attn.bench.machine import facts, threads
from hal_attn.bench.problem import Problem
from hal_attn.bench.report import Report

KIND = "kernels"
Tick = Callable[[str, int, int], None]


def measure(
    problems: Sequence[Problem],
    passes: Sequence[str],
    device: torch.device,
    wanted: Wanted,
    tuned: bool,
    notes: Sequence[str],
    tick: Tick,
) -> Report:
    """All of it on `device`. `tuned`: also the choice that HAL_ATTN_AUTOTUNE makes, kept in HAL_ATTN_CACHE_DIR where
    that is set, else in a folder that is gone afterwards."""
    rows: list[Row] = []
    steps = len(problems) * len(passes)
    with ExitStack() as stack:
        if tuned:
            cache = os.environ.get("HAL_ATTN_CACHE_DIR") or stack.enter_context(TemporaryDirectory())
            wanted = replace(wanted, cache=cache)
        for place, (problem, which) in enumerate((p, w) for p in problems for w in passes):
            say = partial(_say, tick, short(problem), place, steps)
            rows += Bench(problem, which, device, wanted).rows(say)
    tick("done", steps, steps)
    found = facts(device, threads=threads())
    ok = not any(row.wrong or row.failed for row in rows)
    return Report(KIND, "ms", found, tuple(map(as_json, rows)), tuple(notes), ok)


def _say(tick: Tick, name: str, done: int, steps: int, what: str) -> None:
    tick(f"{name}: {what}", done, steps)
