"""What the conformance kit found, as frozen plain values that go to JSON and back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

Status = Literal["passed", "failed", "refused", "not run"]
Effort = Literal["quick", "full"]

FORMAT = 1
STATUSES: tuple[Status, ...] = get_args(Status)
EFFORTS: tuple[Effort, ...] = get_args(Effort)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that the kit looked at.

    Attributes:
        backend: its name; empty where the check is about the platform itself.
        platform: its name.
        feature: the column of the support matrix, one of `hal_attn.testing.FEATURES`.
        rule: the rule of docs/semantics.md or of the contract, one of `hal_attn.testing.RULES`.
        name: tells the checks of one backend apart; short, readable, the same on every machine.
        status: "passed"; "failed"; "refused": not claimed, and refused by name as it should be; "not run".
        message: a sentence for a person: what broke, what was seen, what is allowed and what it looks like; or the
            refusal; or why it was not run. Empty where a check passed without remark.
        error: the largest error found against the oracle; None where nothing was measured, or it is not finite.
        allowed: the error that the rule allows; None where nothing was measured.
        seconds: how long it took.
        request: the call in one line; empty where there was none.
    """

    backend: str
    platform: str
    feature: str
    rule: str
    name: str
    status: Status
    message: str = ""
    error: float | None = None
    allowed: float | None = None
    seconds: float = 0.0
    request: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Features that a backend claims and that were exercised, and those that only its platform's peers claim."""

    claimed: tuple[str, ...] = ()
    only_peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReport:
    """One backend on one platform. Where it is not available there are no checks, but a reason and a remedy.

    Attributes:
        tolerances: (dtype, how many times the error of the precision rule was allowed), where the backend declares it;
            empty in a report of before they were kept.
    """

    name: str
    platform: str
    simulated: bool
    available: bool
    reason: str = ""
    remedy: str = ""
    checks: tuple[Check, ...] = ()
    coverage: Coverage = Coverage()
    tolerances: tuple[tuple[str, float], ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing failed; a backend that is not available has not failed, and has not passed anything either."""
        return not any(check.status == "failed" for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformReport:
    """One platform here.

    Attributes:
        devices: (PyTorch's name, the vendor's, architecture).
        checks: of its own rules.
        versions: (name, version) of PyTorch's build and the vendor's libraries, as its `Detection` has them; empty in a
            report of before they were kept.
    """

    name: str
    simulated: bool
    available: bool
    reason: str = ""
    remedy: str = ""
    devices: tuple[tuple[str, str, str], ...] = ()
    checks: tuple[Check, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def libraries(self) -> str:
        """The versions for a person, without PyTorch's, which is the machine's."""
        return ", ".join(f"{name} {version}" for name, version in self.versions if name != "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run of the kit found on one machine. It holds no host name.

    Attributes:
        machine: (name, value) facts: system, processor, Python, library versions.
        effort: "quick" or "full".
        platforms, backends: those that were asked about, available or not.
        seconds: the whole run.
        format: of the JSON.
    """

    machine: tuple[tuple[str, str], ...]
    effort: Effort
    platforms: tuple[PlatformReport, ...]
    backends: tuple[BackendReport, ...]
    seconds: float
    format: int = FORMAT

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks, of platforms and of backends."""
        parts: tuple[PlatformReport | BackendReport, ...] = (*self.platforms, *self.backends)
        return tuple(check for part in parts for check in part.checks)

    @property
    def counts(self) -> dict[Status, int]:
        """How many checks ended how; each status has an entry."""
        return count(self.checks)

    @property
    def ok(self) -> bool:
        """A backend passed something, and nothing failed. A platform's own rules show nothing of a backend."""
        passed = any(check.status == "passed" for backend in self.backends for check in backend.checks)
        return passed and self.counts["failed"] == 0

    @property
    def on_real_devices(self) -> bool:
        """Every backend that was checked ran on a device, not on a simulated one."""
        ran = [backend for backend in self.backends if backend.checks]
        return bool(ran) and not any(backend.simulated for backend in ran)

    def to_json(self) -> str:
        """JSON text, with `format`, `ok` and `counts` beside the fields."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists."""
        plain = cast("dict[str, Any]", json.loads(json.dumps(asdict(self), allow_nan=False)))
        return {**plain, "ok": self.ok, "counts": self.counts}

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report whose `to_json` gave `text`.

        Raises:
            ValueError: the text is no report, or one of another format.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError("text: got JSON that is no conformance report; allowed: what Report.to_json gives")
        if data["format"] != FORMAT:
            raise ValueError(f"format: got {data['format']!r}; allowed: {FORMAT}; make the report again")
        try:
            return cls(
                machine=tuple((str(name), str(value)) for name, value in data["machine"]),
                effort=data["effort"],
                platforms=tuple(_platform(part) for part in data["platforms"]),
                backends=tuple(_backend(part) for part in data["backends"]),
                seconds=data["seconds"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"text: got a conformance report with a part wrong or missing: {error}") from error


def count(checks: Iterable[Check]) -> dict[Status, int]:
    """How many of `checks` ended how; each status has an entry."""
    found = Counter(check.status for check in checks)
    return {status: found[status] for status in STATUSES}


def _checks(parts: Iterable[Mapping[str, Any]]) -> tuple[Check, ...]:
    return tuple(Check(**part) for part in parts)


def _platform(part: Mapping[str, Any]) -> PlatformReport:
    devices = tuple((str(a), str(b), str(c)) for a, b, c in part["devices"])
    versions = tuple((str(name), str(version)) for name, version in part.get("versions", ()))
    return PlatformReport(**{**part, "devices": devices, "checks": _checks(part["checks"]), "versions": versions})


def _backend(part: Mapping[str, Any]) -> BackendReport:
    coverage = Coverage(**{name: tuple(values) for name, values in part["coverage"].items()})
    tolerances = tuple((str(dtype), float(times)) for dtype, times in part.get("tolerances", ()))
    return BackendReport(**{**part, "coverage": coverage, "checks": _checks(part["checks"]), "tolerances": tolerances})
