"""A whole measurement: every problem, every pass, every way of sharing; rows, and what to write of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hal_attn.bench.machine import facts
from hal_attn.bench.problem import Problem
from hal_attn.bench.report import Report
from hal_attn.bench.sequence_parallel.contenders import Contender, make_modes
from hal_attn.bench.sequence_parallel.effort import Effort
from hal_attn.bench.sequence_parallel.measure import Bench
from hal_attn.bench.sequence_parallel.peers import find_peers
from hal_attn.bench.sequence_parallel.ranks import Ranks
from hal_attn.bench.sequence_parallel.row import BOTH, FORWARD, Row, as_json
from hal_attn.registry import default_registry
from hal_attn.settings import read

KIND = "sequence-parallel"
Tick = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Wanted:
    """What is to be measured. `backend`: one for all, "fastest", or None for what is chosen."""

    problems: Sequence[Problem]
    modes: Sequence[str]
    backend: str | None
    backward: bool
    peers: bool
    effort: Effort


@dataclass(frozen=True)
class Result:
    """The rows, where they were measured, and which peers are not here."""

    rows: tuple[Row, ...]
    facts: dict[str, str]
    missing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether all of ours is right and none of it waits for the device."""
        return all(row.ok for row in self.rows)

    def report(self) -> Report:
        """For a file."""
        return Report(KIND, "ms", self.facts, tuple(map(as_json, self.rows)), self.missing, self.ok)


def measure(ranks: Ranks, wanted: Wanted, tick: Tick) -> Result:
    """All of it, on every rank alike; `tick` is told what is being measured, how much is done and of how much."""
    contenders: list[Contender] = [*make_modes(wanted.modes, ranks.size)]
    missing: list[str] = []
    if wanted.peers:
        peers, missing = find_peers(ranks)
        contenders += peers
    passes = (FORWARD, BOTH) if wanted.backward else (FORWARD,)
    steps = len(wanted.problems) * len(passes) * (len(contenders) + 1)
    rows: list[Row] = []
    tick("starting", 0, steps)
    for problem in wanted.problems:
        bench = Bench(ranks, problem, wanted.effort, wanted.backend)
        for which in passes:
            for row in bench.rows(contenders, which):
                rows.append(row)
                tick(f"{row.name}, {problem.tokens} tokens", len(rows), steps)
    platform = default_registry().platform_for(ranks.device, read())
    told = f"{ranks.size}, {platform.process_group_backend}, {torch.get_num_threads()} CPU threads each"
    return Result(tuple(rows), facts(ranks.device, ranks=told), tuple(missing))
