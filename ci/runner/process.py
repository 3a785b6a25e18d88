"""Run a command with its output in a file, within a time."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TAIL = 30
# Seconds between asking a command to end and ending it. GitHub leaves a cancelled run ten in all.
PATIENCE = 3.0


@dataclass(frozen=True)
class Completed:
    """How a command ended: its exit status, or `None` where it ran out of time; `tail` is the end of its output."""

    returncode: int | None
    seconds: float
    tail: str

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, and well."""
        return self.returncode == 0

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.returncode is None:
            return f"stopped after {self.seconds / 60:.0f} minutes, its time limit"
        if self.returncode < 0:
            return f"ended by signal {signal.Signals(-self.returncode).name}"
        return f"exit status {self.returncode}"

    @property
    def verdict(self) -> str:
        """The last line that calls itself an error, or else the last that says something."""
        lines = [line.strip() for line in self.tail.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")]
        return (errors or lines or ["no output"])[-1]


def run(
    command: Sequence[str | Path],
    log: Path,
    *,
    variables: Mapping[str, str],
    folder: Path,
    timeout_minutes: float,
) -> Completed:
    """Run `command` in `folder` with these environment variables alone; stdout and stderr go to the end of `log`."""
    words = [str(word) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(words)}\n")
        file.flush()
        begin = file.tell()
        try:
            # A session of its own, so that its workers end with it.
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            file.write(f"{error}\n")
            return Completed(127, time.monotonic() - start, str(error))
        code = _wait(process, timeout_minutes * 60)
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(begin)
        tail = "".join(file.readlines()[-TAIL:])
    return Completed(code, time.monotonic() - start, tail)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it and all that it started to end, for one of them may have others to end elsewhere; then end those that are
    left, though it was itself the first to go."""
    os.killpg(process.pid, signal.SIGTERM)
    end = time.monotonic() + PATIENCE
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
