"""What was measured for one class of calls, as a value and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """The measurement of one class.

    Attributes:
        milliseconds: (backend, median of one call), the fastest first; none where nothing is known and the platform's
            order stands.
        left_out: (backend, why) of those that must not be chosen: they failed, or computed something else than others.
        rounds: how often each contender was timed.
        when: UTC, ISO 8601.
        origin: where this comes from: a file, or the process group.
    """

    milliseconds: tuple[tuple[str, float], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    rounds: int = 0
    when: str = ""
    origin: str = ""

    def covers(self, names: Iterable[str]) -> bool:
        """Whether each of these was measured, or left out for a reason."""
        return set(names) <= {name for name, _ in (*self.milliseconds, *self.left_out)}

    def describe(self) -> str:
        """When and how it was measured, and where it is kept."""
        where = f" (kept in {self.origin})" if self.origin else ""
        if not self.milliseconds:
            return f"nothing measured counts for calls like this one; the platform's order decides{where}"
        return f"measured {self.when}, {self.rounds} rounds{where}"

    def json(self) -> dict[str, object]:
        """As JSON, without its origin."""
        return {
            "milliseconds": dict(self.milliseconds),
            "left_out": dict(self.left_out),
            "rounds": self.rounds,
            "when": self.when,
        }

    @classmethod
    def parse(cls, value: object, origin: str) -> Record:
        """The record that `json` gave.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(value, Mapping):
            raise ValueError(f"a {type(value).__name__} in the place of a record")
        times, left_out = _mapping(value, "milliseconds"), _mapping(value, "left_out")
        rounds, when = value.get("rounds"), value.get("when")
        if not all(_is_time(time) for time in times.values()):
            raise ValueError("a time that is no positive number")
        if not (
            isinstance(rounds, int) and isinstance(when, str) and all(isinstance(t, str) for t in left_out.values())
        ):
            raise ValueError("a record with fields of other types")
        ordered = sorted(((str(name), float(str(time))) for name, time in times.items()), key=lambda pair: pair[1])
        reasons = tuple((str(name), str(reason)) for name, reason in left_out.items())
        return cls(tuple(ordered), reasons, rounds, when, origin)


def _mapping(value: Mapping[object, object], name: str) -> Mapping[object, object]:
    found = value.get(name)
    if not isinstance(found, Mapping):
        raise ValueError(f"no {name}")
    return found


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
