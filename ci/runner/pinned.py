"""The platform's pinned environment: a virtual environment that pip makes from the constraints."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from runner import constraints, process, venvs
from runner.environment import Environment, NoEnvironment, joined, variables_of
from runner.options import Options
from runner.platforms import ROOT

EXTRAS = ("bench", "demo", "dev")


def make(options: Options) -> Environment:
    """The environment of the platform; made anew only when what it is made of changed."""
    platform = options.installs
    folder = options.environments.resolve() / platform.name
    pins = constraints.effective(platform.constraints, options.overrides)
    python, stamp = folder / "bin" / "python", folder / ".made-from"
    made_from = _fingerprint(options, pins)
    # Beside the folder: one that was being made when its run was ended is still known as ours.
    ours = folder.with_suffix(".ours")
    with locked(folder.with_suffix(".lock")):
        if not (stamp.exists() and stamp.read_text(encoding="utf-8") == made_from):
            if folder.exists() and any(folder.iterdir()) and not ours.exists():
                raise NoEnvironment(f"{folder} is not empty and not of ci/run", "name another --environments")
            ours.touch()
            _create(options, folder, pins)
            _install(options, python, pins)
            stamp.write_text(made_from, encoding="utf-8")
    variables = variables_of(options.platform, simulated=bool(options.simulation))
    variables |= {"PATH": joined(python.parent, variables.get("PATH")), "VIRTUAL_ENV": str(folder)}
    return Environment(python, variables)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Wait until no other run makes this environment; the lock ends with the process, however it ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fingerprint(options: Options, pins: Mapping[str, str]) -> str:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    content = json.dumps([dict(pins), project, str(ROOT), sys.version, options.python])
    return hashlib.sha256(content.encode()).hexdigest()


def _create(options: Options, folder: Path, pins: Mapping[str, str]) -> None:
    """An empty environment; one that keeps the interpreter's own PyTorch also sees the packages beside it."""
    interpreter = options.python or sys.executable
    python = venvs.create(interpreter, folder, with_pip=True)
    if options.installs.own_torch:
        venvs.lay_over(interpreter, folder)
        found = Environment(python, os.environ).facts(pins)["torch"]
        if str(found).partition("+")[0] != pins["torch"]:
            # pip would fetch the pinned release from the index, which is a build for another vendor.
            reason = f"{interpreter} has PyTorch {found}, and the pinned release for {options.installs.name} is"
            remedy = "start from an image that has it (ci/containers), or name another release with --override torch=="
            raise NoEnvironment(f"{reason} {pins['torch']}, which the index does not have for it", f"{remedy}VERSION")


def _install(options: Options, python: Path, pins: Mapping[str, str]) -> None:
    platform, listed = options.installs, options.out / "constraints.txt"
    constraints.write(dict(pins), listed)
    extras = ",".join(sorted((*EXTRAS, *platform.extras)))
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        listed,
    ]
    if options.wheels is not None:
        pip += ["--find-links", options.wheels]
    # Without the vendor's libraries, importing torch loads the vendor's extension and fails, and so do builds with it.
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    log = options.log_folder / "environment.log"
    for wanted in (*((name,) for name in platform.packages), ("--editable", f"{ROOT}[{extras}]")):
        done = process.run(
            [*pip, *wanted], log, variables=variables, folder=ROOT, timeout_minutes=options.timeout_minutes
        )
        if not done.ok:
            reason = f"pip could not install {wanted[-1]} by {platform.constraints.name}: {done.ending}, {done.verdict}"
            raise NoEnvironment(reason, f"read {log}; --no-install uses the interpreter as it is")
