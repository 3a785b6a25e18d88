"""The command line of `ci/run`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from runner import constraints, ending, matrix, pipeline, report
from runner.options import STEPS, Options
from runner.platforms import PLATFORMS, ROOT, SIMULATED
from runner.result import Result, Status

DESCRIPTION = """\
The one entry that a runner calls on any machine:

    ci/run cpu|cuda|rocm|ascend                       on a machine that has the device
    ci/run --simulate ascend|cuda|rocm[:GENERATION]   that vendor's adapters over its simulated kernels
    ci/run --collect FOLDER [--expect FILE]           the reports below FOLDER side by side

Steps: {steps}. One that fails stops none after it.
Exit status: 0 all steps passed; 1 one failed, or the run was ended; 2 wrong arguments.
docs/runners.md says how to set a runner up and how to read what it leaves.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        if given.collect is not None:
            return _collect(given.collect, given.expect)
        options = _options(parser, given)
    except (matrix.MatrixError, constraints.ConstraintError, OSError) as error:
        parser.error(str(error))
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report.clear(options.out)
    print(f"ci/run {options.title}: {', '.join(options.steps)}; logs in {options.log_folder}", flush=True)
    with ending.heeded():
        results = _run(options, started)
        report.write(options, results, started)
    print(report.plain(options, results))
    return 0 if report.ok(results) else 1


def _run(options: Options, started: str) -> list[Result]:
    """The results of all steps, with a report after each; of one that was ended and those after it where one was."""
    results: list[Result] = []
    begun = time.monotonic()

    def left(why: str) -> list[Result]:
        return [Result(step, Status.NOT_RUN, why) for step in pipeline.planned(options)[len(results) :]]

    def tell(result: Result) -> None:
        nonlocal begun
        results.append(result)
        begun = time.monotonic()
        print(f"{result.step}: {result.status.value}: {result.summary}", flush=True)
        report.write(options, [*results, *left("no result yet")], started, over=False)

    report.write(options, left("no result yet"), started, over=False)
    try:
        pipeline.run(options, tell)
    except ending.Ended as ended:
        reason, remedy = f"ended by {ended}, with all that it had started", "run it again; give it more time"
        remaining = left("the run was ended before it")
        if remaining:
            remaining[0] = Result(remaining[0].step, Status.FAILED, reason, remedy, time.monotonic() - begun)
        results += remaining
    return results


def _collect(folder: Path, expect: Path | None) -> int:
    text, fine = matrix.collect(folder, [] if expect is None else matrix.expected(expect))
    print(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(text)
    return 0 if fine else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ci/run",
        description=DESCRIPTION.format(steps=", ".join(STEPS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("platform", nargs="?", metavar="PLATFORM", help=", ".join(PLATFORMS))
    add("--simulate", metavar="NAME[:GENERATION]", help=f"{', '.join(SIMULATED)}; without the device")
    add("--steps", metavar="NAME,..", default=",".join(STEPS), help="only these steps")
    add("--out", type=Path, default=Path("ci-report"), help="where the reports go (ci-report)")
    add("--full", action="store_true", help="conformance in full, not quickly")
    add("--no-install", action="store_true", help="install nothing: the interpreter as it is")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels to use besides, where there is no network instead")
    add("--python", default="", help="the interpreter to start from")
    add("--environments", type=Path, default=ROOT / ".venv-ci", metavar="FOLDER", help="where they are made (.venv-ci)")
    add("--override", action="append", default=[], metavar="NAME==VERSION", help="in place of the pinned version")
    add("--tests", nargs="+", default=[], metavar="PATH", help="only these unit tests")
    add("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes for the tests")
    add("--timeout", type=float, default=60.0, metavar="MINUTES", help="for each step (60)")
    add("--figures", type=Path, metavar="FOLDER", help="kept times, by kind of machine (figures in --out)")
    add("--keep-figures", action="store_true", help="take this run's times in place of the kept ones")
    add("--slowdown", type=float, default=1.25, metavar="RATIO", help="from when on a time counts as slower (1.25)")
    add("--fail-on-slowdown", action="store_true", help="a slowdown fails the run")
    add("--collect", type=Path, metavar="FOLDER", help="run nothing; put the reports below FOLDER side by side")
    add("--expect", type=Path, metavar="FILE", help="with --collect: JSON list of the runs that should be there")
    return parser


def _options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Options:
    if (given.platform is None) == (given.simulate is None):
        parser.error("name one PLATFORM, or --simulate NAME; it is one of them")
    name = given.platform or given.simulate.partition(":")[0]
    allowed = tuple(PLATFORMS) if given.platform else SIMULATED
    if name not in allowed:
        parser.error(f"platform {name!r} is not known here; known are {', '.join(allowed)}")
    steps = tuple(filter(None, given.steps.split(",")))
    if not steps or (unknown := [step for step in steps if step not in STEPS]):
        parser.error(f"--steps {', '.join(unknown) if steps else 'is empty'}; steps are {', '.join(STEPS)}")
    if given.wheels is not None and not given.wheels.is_dir():
        parser.error(f"--wheels {given.wheels} is no folder")
    for flag, number in (("--workers", given.workers), ("--timeout", given.timeout)):
        if number <= 0:
            parser.error(f"{flag} {number}; it must be above 0")
    if given.slowdown <= 1:
        parser.error(f"--slowdown {given.slowdown}; it must be above 1, as in 1.25")
    for override in given.override:
        constraints.pin(override)
    return Options(
        platform=PLATFORMS[name],
        simulation=given.simulate or "",
        steps=tuple(step for step in STEPS if step in steps),
        out=given.out.resolve(),
        environments=given.environments,
        python=given.python,
        install=not given.no_install,
        wheels=given.wheels,
        overrides=tuple(given.override),
        figures=given.figures,
        keep_figures=given.keep_figures,
        slowdown=given.slowdown,
        fail_on_slowdown=given.fail_on_slowdown,
        full=given.full,
        workers=given.workers,
        timeout_minutes=given.timeout,
        tests=tuple(given.tests),
    )


if __name__ == "__main__":
    sys.exit(main())
