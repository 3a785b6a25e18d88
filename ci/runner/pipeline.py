"""The steps in their order. One that fails stops none after it; one that breaks has failed."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial

from runner import bench, conformance, detection, device, tests
from runner.environment import Environment
from runner.options import STEPS, Options
from runner.preparing import prepare
from runner.result import Result, Status

IN_ENVIRONMENT: dict[str, Callable[[Options, Environment], Result]] = {
    "detection": detection.check,
    "unit": tests.unit,
    "hardware": tests.hardware,
    "conformance": conformance.check,
    "bench": bench.check,
}
# Judged by doctor's report: which backends are there, and what kind of machine it is.
BY_DETECTION = {"conformance", "bench"}


def planned(options: Options) -> list[str]:
    """The steps of this run in their order: those asked for, and those that they need."""
    device = ["device"] if "device" in options.steps else []
    if options.steps == ("device",):
        return device
    asked = {*options.steps, *(("detection",) if BY_DETECTION & set(options.steps) else ())}
    # What follows needs the environment, so it is made and reported even where only later steps are asked for.
    return [*device, "environment", *(step for step in STEPS if step in asked and step in IN_ENVIRONMENT)]


def run(options: Options, tell: Callable[[Result], None]) -> list[Result]:
    """Every step that is planned; `tell` hears each result as soon as it is there."""
    results: list[Result] = []
    made: list[Environment] = []

    def make() -> Result:
        environment, result = prepare(options)
        made.extend([environment] if environment else [])
        return result

    def check(step: str) -> Result:
        if step == "device":
            return device.check(options)
        if step == "environment":
            return make()
        if not made:
            return Result(step, Status.FAILED, "no environment to run it in", "see the step environment")
        return IN_ENVIRONMENT[step](options, made[0])

    for step in planned(options):
        results.append(_guarded(step, options, partial(check, step)))
        tell(results[-1])
    return results


def _guarded(step: str, options: Options, check: Callable[[], Result]) -> Result:
    start = time.monotonic()
    try:
        return check()
    except Exception as error:
        log = options.log_folder / f"{step}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        reason = f"ci/run itself broke: {type(error).__name__}: {error}"
        return Result(step, Status.FAILED, reason, f"read {log}", time.monotonic() - start)
