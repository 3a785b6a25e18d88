"""Which environment this run gets: the pinned one, or the interpreter as it is; and how making it went."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

from runner import constraints, overlay, pinned, process
from runner.environment import Environment, NoEnvironment
from runner.options import Options
from runner.platforms import ROOT
from runner.result import Result, Status

PROBE = "filelock"


def prepare(options: Options) -> tuple[Environment | None, Result]:
    """The environment and how that went; no environment where nothing here can run the steps."""
    start = time.monotonic()
    try:
        pins = constraints.effective(options.installs.constraints, options.overrides)
        why = "--no-install" if not options.install else _offline(options, pins)
        environment = overlay.make(options, why) if why else pinned.make(options)
        facts = environment.facts(pins)
    except NoEnvironment as error:
        reason, remedy = error.args
        return None, Result("environment", Status.FAILED, reason, remedy, time.monotonic() - start)
    (options.out / "environment.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    seconds = time.monotonic() - start
    return environment, Result("environment", Status.PASSED, _summary(facts), "", seconds, ("environment.json",))


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


def _offline(options: Options, pins: dict[str, str]) -> str:
    """Why nothing can be installed; empty where pip fetches a small package. pip is asked, with its own settings."""
    python, wanted = options.python or sys.executable, f"{PROBE}=={pins[PROBE]}"
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-cache-dir", "--retries", "0", "--timeout", "15", "--dest", folder, wanted]
        log = options.log_folder / "environment.log"
        done = process.run(command, log, variables=os.environ, folder=ROOT, timeout_minutes=3)
    return "" if done.ok else f"pip cannot fetch {wanted}: {done.verdict}"
