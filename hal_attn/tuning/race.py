"""Which of several calls is the fastest, timed in turns until noise can no longer decide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from hal_attn.guard import attempt

# What a wrong choice may cost.
TOLERANCE = 0.02
LEAST_ROUNDS, FEWEST_ROUNDS, MOST_ROUNDS = 5, 3, 60
# Milliseconds: of one sample at least, of all samples together at most (but for the fewest rounds).
SAMPLE, BUDGET = 2.0, 2000.0
MOST_CALLS = 100
# A contender this many times slower than the best is out: at the first look, and after the least rounds.
HOPELESS, BEHIND = 2.0, 1.2

Sample = Callable[[str, int], float]


@dataclass(frozen=True)
class Outcome:
    """Milliseconds of a call by name, the reasons of those that failed, and the rounds that were run."""

    milliseconds: dict[str, float]
    failures: dict[str, str]
    rounds: int


def race(names: Iterable[str], sample: Sample) -> Outcome:
    """The medians of `sample(name, calls)`, the milliseconds of one of that many calls in a row.

    Contenders take turns, and begin each round one place later, so that a clock that drifts meets all of them alike.
    It ends once no other contender is, with 95 % confidence, more than `TOLERANCE` faster than the leader; or with the
    budget.
    """
    runners = _Runners(sample)
    running = runners.first_look(list(names))
    rounds = 0
    while running and rounds < MOST_ROUNDS:
        turn = rounds % len(running)
        for name in (*running[turn:], *running[:turn]):
            runners.timed(name)
        running = [name for name in running if name in runners.times]
        rounds += 1
        if len(running) < 2 and rounds >= FEWEST_ROUNDS:
            break
        if rounds >= LEAST_ROUNDS:
            running = runners.near(running)
            if runners.settled(running):
                break
        if rounds >= FEWEST_ROUNDS and runners.spent >= BUDGET:
            break
    medians = {name: statistics.median(times) for name, times in runners.times.items() if times}
    return Outcome(medians, runners.failures, rounds)


class _Runners:
    """The samples so far. Those of one round stand at the same place in `times`."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._calls: dict[str, int] = {}
        self.times: dict[str, list[float]] = {}
        self.failures: dict[str, str] = {}
        self.spent = 0.0

    def first_look(self, names: Sequence[str]) -> list[str]:
        """Those with a chance. The others keep the time of this look."""
        looks = {name: look for name in names if (look := self._look(name)) is not None}
        best = min(looks.values(), default=0.0)
        running = [name for name, look in looks.items() if look <= HOPELESS * best]
        self.times = {name: [] if name in running else [look] for name, look in looks.items()}
        self._calls = {name: min(MOST_CALLS, max(1, math.ceil(SAMPLE / looks[name]))) for name in running}
        return running

    def _look(self, name: str) -> float | None:
        looks: list[float] = []
        while len(looks) < 3 and sum(looks) < 10 * SAMPLE:
            look = self._take(name, 1)
            if look is None:
                return None
            looks.append(look)
        return min(looks)

    def timed(self, name: str) -> None:
        """One more sample; a call that fails ends its times."""
        time = self._take(name, self._calls[name])
        if time is None:
            del self.times[name]
        else:
            self.times[name].append(time)

    def _take(self, name: str, calls: int) -> float | None:
        time, failure = attempt(partial(self._sample, name, calls), 0.0)
        if failure:
            self.failures[name] = failure
            return None
        self.spent += time * calls
        return time

    def near(self, running: Sequence[str]) -> list[str]:
        """Those whose best sample is near the best median."""
        best = min((statistics.median(self.times[name]) for name in running), default=0.0)
        return [name for name in running if min(self.times[name]) <= BEHIND * best]

    def settled(self, running: Sequence[str]) -> bool:
        """Nobody is likely to be faster than the leader by more than `TOLERANCE`."""
        if len(running) < 2:
            return True
        leader = min(running, key=lambda name: statistics.median(self.times[name]))
        return all(self._lower_bound(name, leader) >= 1 - TOLERANCE for name in running if name != leader)

    def _lower_bound(self, name: str, leader: str) -> float:
        """Of the median of its time over the leader's, round by round: an order statistic, so no noise is assumed to be
        normal."""
        ratios = sorted(mine / other for mine, other in zip(self.times[name], self.times[leader], strict=True))
        count = len(ratios)
        return ratios[max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))]
