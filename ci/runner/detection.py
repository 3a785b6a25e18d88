"""What the platform's own detection says: `hal-attn doctor --json`, held to one platform."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner import process
from runner.environment import Environment
from runner.options import Options
from runner.platforms import ROOT
from runner.result import Result, Status

REPORT = "doctor.json"


def check(options: Options, environment: Environment) -> Result:
    """Fail where the platform is not usable, simulated without being asked, or not simulated though it was asked."""
    start, log = time.monotonic(), options.log_folder / "detection.log"
    report = options.out / REPORT
    # The report is what stdout has; stderr goes to the log.
    shell = ["bash", "-c", 'exec "$0" -m hal_attn.cli doctor --json >"$1"', str(environment.python), str(report)]
    done = process.run(
        shell, log, variables=chosen(options, environment), folder=ROOT, timeout_minutes=options.timeout_minutes
    )
    found = _platform(options, report)
    seconds = time.monotonic() - start
    if not found:
        reason = f"hal-attn doctor gave no report: {done.ending}, {done.verdict}"
        return Result("detection", Status.FAILED, reason, f"read {log}", seconds)
    said, files = str(found["reason"]), (REPORT,)
    if not found["available"]:
        # A simulation that is not there is a wrong setting, which doctor names among its problems.
        said = _problems(report) if options.simulation else said
        return Result("detection", Status.FAILED, said, str(found["remedy"]), seconds, files)
    if bool(found["simulated"]) != bool(options.simulation):
        reason = f"{options.title} was asked for, but doctor says: {said}"
        return Result("detection", Status.FAILED, reason, "look for HAL_ATTN_SIMULATE", seconds, files)
    if not done.ok:
        return Result("detection", Status.FAILED, f"doctor finds fault: {_problems(report)}", "", seconds, files)
    status = Status.SIMULATED if options.simulation else Status.PASSED
    names = dict.fromkeys(device["name"] for device in found["devices"])
    count = f"{len(found['devices'])} x {', '.join(names)}: " if names else ""
    return Result("detection", status, f"{count}{said}", "", seconds, files)


def chosen(options: Options, environment: Environment) -> dict[str, str]:
    """The environment's variables with those that choose this run's platform."""
    variables = {**environment.variables, "HAL_ATTN_PLATFORM": options.platform.name}
    if options.simulation:
        variables["HAL_ATTN_SIMULATE"] = options.simulation
    return variables


def installed_backends(options: Options) -> tuple[str, ...]:
    """The platform's backends whose library is there, broken ones too: all that its hardware has to show.

    A library that is not installed is named by `doctor`, and is no fault of the machine.
    """
    entries = _read(options.out / REPORT).get("backends", [])
    own = (entry for entry in entries if entry["platform"] == options.platform.name)
    return tuple(
        entry["name"] for entry in own if entry["usable"] or (entry["reason"] or {}).get("rule") != "installed"
    )


def machine_kind(options: Options) -> str:
    """A name for machines whose times may be compared: the platform and its device, as in `cuda-nvidia-h200`."""
    found = _platform(options, options.out / REPORT)
    devices = found.get("devices", [])
    names = [device["name"] for device in devices]
    if options.platform.name == "cpu":
        names = [f"{_cpu_model()} {os.cpu_count()} cores"]
    elif len(names) > 1:
        names = [f"{names[0]} x{len(names)}"]
    return re.sub(r"[^a-z0-9]+", "-", " ".join((options.platform.name, *names)).lower()).strip("-")


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return os.uname().machine
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else os.uname().machine


def _read(report: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def _platform(options: Options, report: Path) -> Mapping[str, Any]:
    """The entry of this run's platform; empty without a report."""
    entries = _read(report).get("platforms", [])
    return next((entry for entry in entries if entry["name"] == options.platform.name), {})


def _problems(report: Path) -> str:
    return "; ".join(_read(report).get("problems", [])) or "no problem is named"
