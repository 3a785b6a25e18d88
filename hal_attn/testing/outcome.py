"""A check before it runs, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hal_attn.guard import attempt
from hal_attn.refusal import Refusal
from hal_attn.testing.features import RULES
from hal_attn.testing.precision import Comparison
from hal_attn.testing.report import Check, Status


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a check; `rule` is the one that broke, where that is another than the check's."""

    status: Status
    message: str = ""
    error: float | None = None
    allowed: float | None = None
    rule: str = ""
    request: str = ""


PASSED = Outcome("passed")


@dataclass(frozen=True)
class Planned:
    """One check that is to run.

    Attributes:
        rule: what it breaks where it fails and nothing closer is found.
        request: describes the call.
        refusals: why the backend does not take the call, as far as it was asked; then `run` looks at the refusal.
    """

    name: str
    feature: str
    rule: str
    run: Callable[[], Outcome]
    request: Callable[[], str] = str
    refusals: tuple[Refusal, ...] = ()


def failed(message: str, rule: str, comparison: Comparison | None = None) -> Outcome:
    """A failure of `rule`, with its text behind what was seen."""
    error, allowed = (None, None) if comparison is None else (comparison.error, comparison.allowed)
    return Outcome("failed", f"{message}; the rule: {RULES[rule]}", error, allowed, rule)


def passed(comparison: Comparison, message: str = "") -> Outcome:
    """A pass, with what was measured."""
    return Outcome("passed", message, comparison.error, comparison.allowed)


def not_run(reason: str) -> Outcome:
    """Nothing was checked, and why."""
    return Outcome("not run", reason)


def perform(planned: Planned, backend: str, platform: str) -> Check:
    """Runs one check; what a backend raises in it is a failure, never the end of the others."""
    begin = time.perf_counter()
    outcome, raised = attempt(planned.run, None)
    if outcome is None:
        outcome = failed(f"it raised {raised}", "contract")
    request, _ = attempt(planned.request, "")
    fields: dict[str, Any] = {name: getattr(outcome, name) for name in ("status", "message", "error", "allowed")}
    return Check(
        backend=backend,
        platform=platform,
        feature=planned.feature,
        rule=outcome.rule or planned.rule,
        name=planned.name,
        seconds=time.perf_counter() - begin,
        request=request,
        **fields,
    )
