"""Is the device there? Asked of the system, before anything is installed; `detection` asks the platform itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from runner.options import Options
from runner.platforms import Platform
from runner.result import Result, Status


def check(options: Options, root: Path = Path("/")) -> Result:
    """Fail without the platform's device files, or where this user may not open them; the tool's word counts too.

    A driver may hand its devices on by other files (WSL does); then the vendor's tool must list them.
    """
    platform, start = options.platform, time.monotonic()
    if options.simulation:
        return Result(
            "device", Status.SIMULATED, f"no device of {platform.name} is asked for, its kernels are simulated"
        )
    if not platform.device_files:
        return Result("device", Status.PASSED, f"{os.cpu_count()} CPU cores")
    found, missing = _device_files(platform, root)
    listed, said = _ask_tool(platform)
    tool = f"{' '.join(platform.tool)}: {said}"
    seconds = time.monotonic() - start
    if missing and not listed:
        reason = f"no device of {platform.name} here: no /{', no /'.join(missing)}; {tool}"
        return Result("device", Status.FAILED, reason, platform.remedy, seconds)
    closed = [str(path) for path in found if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        reason = f"this user may not read and write {', '.join(closed)}"
        remedy = f"put the user in the group that owns the file (`ls -l {closed[0]}` shows it), then log in again"
        return Result("device", Status.FAILED, reason, remedy, seconds)
    files = ", ".join(str(path) for path in found) or f"without /{', /'.join(missing)}"
    return Result("device", Status.PASSED, f"{files}; {tool}", seconds=seconds)


def _device_files(platform: Platform, root: Path) -> tuple[list[Path], list[str]]:
    """Files that are there, and the patterns that match none."""
    by_pattern = {pattern: sorted(root.glob(pattern)) for pattern in platform.device_files}
    found = [path for paths in by_pattern.values() for path in paths]
    return found, [pattern for pattern, paths in by_pattern.items() if not paths]


def _ask_tool(platform: Platform) -> tuple[bool, str]:
    """Whether the vendor's tool is content, and one line of what it says."""
    if shutil.which(platform.tool[0]) is None:
        return False, "not found"
    try:
        done = subprocess.run(platform.tool, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    said = lines[0] if lines else "no output"
    return done.returncode == 0, said if done.returncode == 0 else f"exit status {done.returncode}, {said}"
