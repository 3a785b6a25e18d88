"""Which environment this run gets: the pinned one, or the interpreter as it is; and how making it went."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time

from runner import constraints, overlay, pinned, process
from runner.environment import Environment, NoEnvironment
from runner.options import Options
from runner.platforms import ROOT
from runner.result import Result, Status

PROBE = "filelock"
# The oldest Python of the versions in ci/constraints-*.txt.
PINNED_FOR = (3, 11)
# What the later steps start. A module is found without what it imports itself, so looking for modules is not enough;
# and the command has to read an option, for which typer imports more than for --version.
STARTS = (("-m", "hal_attn.cli", "env", "--json"), ("-c", "import filelock, hypothesis, jinja2, pytest"))
_MISSING = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)


def prepare(options: Options) -> tuple[Environment | None, Result]:
    """The environment and how that went; no environment where nothing here can run the steps."""
    start = time.monotonic()
    try:
        pins = constraints.effective(options.installs.constraints, options.overrides)
        version = _version(options)
        why = "--no-install" if not options.install else _offline(options, pins)
        if not why and version < PINNED_FOR:
            raise NoEnvironment(*_too_old(options, version))
        environment = overlay.make(options, why) if why else pinned.make(options)
        _start(options, environment)
        facts = environment.facts(pins)
    except NoEnvironment as error:
        reason, remedy = error.args
        return None, Result("environment", Status.FAILED, reason, remedy, time.monotonic() - start)
    (options.out / "environment.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    seconds = time.monotonic() - start
    return environment, Result("environment", Status.PASSED, _summary(facts), "", seconds, ("environment.json",))


def _start(options: Options, environment: Environment) -> None:
    """Start what the later steps start; an error names the module that is missing, and the wheel to add."""
    log = options.log_folder / "environment.log"
    for words in STARTS:
        command = [environment.python, *words]
        done = process.run(command, log, variables=environment.variables, folder=ROOT, timeout_minutes=10)
        if done.ok:
            continue
        said, missing = f"python {shlex.join(words)} does not start", _MISSING.findall(done.tail)
        if not missing:
            raise NoEnvironment(f"{said}: {done.verdict}", f"read {log}")
        name = missing[-1].partition(".")[0]
        # Without --no-deps: what that package needs is likely to be missing as well.
        carry = f"add the wheels of {name} and of what it needs: pip download --only-binary=:all: --dest wheels {name}"
        remedy = f"{carry}, then --wheels wheels" if environment.over else f"read {log}"
        raise NoEnvironment(f"{said}: the module {name} is missing in {environment.over or environment.python}", remedy)


def _summary(facts: dict[str, object]) -> str:
    said = f"Python {facts['python']}, PyTorch {facts['torch']}"
    if not facts["why_not_pinned"]:
        return f"{said}, pinned"
    differ = facts["differ"]
    assert isinstance(differ, list)
    versions = (
        f"{len(differ)} packages in other versions than pinned (environment.json)"
        if differ
        else "its versions those pinned"
    )
    said += f": {facts['over']} as it is, {versions}"
    return f"{said}; NOT INSTALLED from the constraints: {facts['why_not_pinned']}"


def _python(options: Options) -> str:
    return options.python or sys.executable


def _version(options: Options) -> tuple[int, ...]:
    """Of the interpreter to start from."""
    command = [_python(options), "-c", "import sys; print(*sys.version_info[:3])"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return tuple(map(int, said.split()))
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        reason, remedy = f"{command[0]} is no Python that runs: {error}", "name one with --python"
        raise NoEnvironment(reason, remedy) from error


def _too_old(options: Options, version: tuple[int, ...]) -> tuple[str, str]:
    """(reason, remedy)."""
    had, needed = (".".join(map(str, numbers)) for numbers in (version, PINNED_FOR))
    return (
        f"{_python(options)} is Python {had}; the pinned versions need {needed} or newer",
        f"name a newer one: --python /path/to/python{needed}; or --no-install, which takes this one as it is",
    )


def _offline(options: Options, pins: dict[str, str]) -> str:
    """Why nothing can be installed; empty where pip fetches a small package. pip is asked, with its own settings."""
    python, wanted = _python(options), f"{PROBE}=={pins[PROBE]}"
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-cache-dir", "--retries", "0", "--timeout", "15", "--dest", folder, wanted]
        log = options.log_folder / "environment.log"
        done = process.run(command, log, variables=os.environ, folder=ROOT, timeout_minutes=3)
    return "" if done.ok else f"pip cannot fetch {wanted}: {done.verdict}"
