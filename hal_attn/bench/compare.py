"""A measurement beside an older one: the ratio of each row, and which of ours became slower."""

from __future__ import annotations

from dataclasses import dataclass

from hal_attn.bench.report import Report
from hal_attn.errors import InvalidAttentionInputError

# Where a measurement was made; "versions" are compared one by one.
_PLACE = ("machine", "device", "ranks", "threads")


@dataclass(frozen=True)
class Change:
    """One row then and now, in the report's measure; None where it was not measured."""

    key: str
    old: float | None
    new: float | None
    ours: bool

    @property
    def ratio(self) -> float | None:
        """The new time as a multiple of the old; None where one of them is missing."""
        return self.new / self.old if self.new is not None and self.old else None


@dataclass(frozen=True)
class Comparison:
    """Every row of both files.

    Attributes:
        differences: what is not the same about where they were made.
        slower: the ratio above which a row of ours counts as slower.
    """

    changes: tuple[Change, ...]
    differences: tuple[str, ...]
    slower: float

    def is_slower(self, change: Change) -> bool:
        """Whether it is ours and slower than allowed; a row that no longer runs is, too."""
        if not change.ours:
            return False
        if change.old is not None and change.new is None:
            return True
        return change.ratio is not None and change.ratio > self.slower

    @property
    def ok(self) -> bool:
        """Whether none of ours is slower."""
        return not any(map(self.is_slower, self.changes))


def compare(new: Report, old: Report, slower: float, anyway: bool = False) -> Comparison:
    """`new` against `old`.

    Rows that only one of them has are left out; one that no longer runs is kept, with None.

    Raises:
        InvalidAttentionInputError: they measure different things, have no row in common, or were made in different
            places without `anyway`.
    """
    if new.kind != old.kind:
        raise InvalidAttentionInputError("--compare", f"a file of {old.kind}", f"a file of {new.kind}")
    differences = _differences(new.facts, old.facts)
    if differences and not anyway:
        raise InvalidAttentionInputError(
            "--compare",
            "a file made elsewhere: " + "; ".join(differences),
            "one made on the same machine with the same versions and settings",
            "--anyway compares all the same, and says so",
        )
    before = {row["key"]: row[old.measure] for row in old.rows}
    changes = tuple(
        Change(row["key"], before[row["key"]], row[new.measure], bool(row["ours"]))
        for row in new.rows
        if row["key"] in before
    )
    if not changes:
        raise InvalidAttentionInputError("--compare", "a file without any row of this measurement", "one with some")
    return Comparison(changes, differences, slower)


def _differences(new: dict[str, str], old: dict[str, str]) -> tuple[str, ...]:
    """What is not the same, but for hal_attn itself, which is what is compared."""
    found = [
        f"{name} {old.get(name, 'unknown')}, now {new.get(name, 'unknown')}"
        for name in _PLACE
        if old.get(name) != new.get(name)
    ]
    for then, now in ((_versions(old), _versions(new)), (_settings(old), _settings(new))):
        for name in sorted(then.keys() | now.keys()):
            if then.get(name) != now.get(name):
                found.append(f"{name} {then.get(name, 'none')}, now {now.get(name, 'none')}")
    return tuple(found)


def _versions(facts: dict[str, str]) -> dict[str, str]:
    parts = (part.rpartition(" ") for part in facts.get("versions", "").split(", ") if part)
    return {name: version for name, _, version in parts if name != "hal_attn"}


def _settings(facts: dict[str, str]) -> dict[str, str]:
    """Those that may change a time."""
    parts = (part.partition("=") for part in facts.get("settings", "none").split() if "=" in part)
    return {name: value for name, _, value in parts if name not in ("HAL_ATTN_CACHE_DIR", "HAL_ATTN_LOG_LEVEL")}
