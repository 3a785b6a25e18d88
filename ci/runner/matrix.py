"""Many runs side by side: a row a run, a column a step; a run that left no report is named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.options import STEPS


class MatrixError(ValueError):
    """There is nothing to put side by side."""


def collect(folder: Path, expected: Sequence[str]) -> tuple[str, bool]:
    """Every report.json below `folder` as a table in Markdown, by the folder it lies in; and whether all is well.

    `expected` are the folders that should be there.
    """
    reports = {path.parent.name: _read(path) for path in sorted(folder.rglob("report.json"))}
    if not reports and not expected:
        raise MatrixError(f"no report.json below {folder}")
    names = list(dict.fromkeys((*expected, *reports)))
    lines = ["## What broke", "", "| Run | " + " | ".join(STEPS) + " |", "| --- |" + " --- |" * len(STEPS)]
    lines += [_row(name, reports.get(name, {})) for name in names]
    broken = [line for name in names for line in _failures(name, reports.get(name))]
    lines += ["", *(broken or ["Nothing."]), ""]
    return "\n".join(lines), not broken


def _read(path: Path) -> Mapping[str, Any]:
    """A report of `ci/run`; empty where it is cut short, or another's file of that name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) and {"ok", "steps"} <= content.keys() else {}


def expected(file: Path) -> list[str]:
    """The names of the runs that should be there."""
    try:
        return [str(cell["name"]) for cell in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        need = "a JSON list of objects with a name, as ci/nightly.json"
        raise MatrixError(
            f"--expect {file} is something else ({type(error).__name__}: {error}); need {need}"
        ) from error


def _row(name: str, report: Mapping[str, Any]) -> str:
    steps = {step["step"]: step["status"] for step in report.get("steps", [])}
    cells = [steps.get(step, "-" if report else "no report") for step in STEPS]
    return f"| {name} | " + " | ".join(cells) + " |"


def _failures(name: str, report: Mapping[str, Any] | None) -> list[str]:
    if report == {}:
        return [f"- {name}: its report.json is none of ci/run, or is cut short; need the file that ci/run wrote"]
    if report is None:
        return [f"- {name}: no report; its job ended before it wrote one, or no runner took it"]
    failed = [step for step in report["steps"] if step["status"] == "FAILED"]
    if not failed and not report["ok"]:
        return [f"- {name}: it was ended before it was over"]
    return [f"- {name}, {step['step']}: {step['summary']}" for step in failed]
