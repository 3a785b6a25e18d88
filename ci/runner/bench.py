"""`hal-attn bench` in its default effort, not `--quick`, beside the figures kept of this kind of machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import process
from runner.detection import chosen, machine_kind
from runner.environment import Environment
from runner.options import Options
from runner.platforms import ROOT
from runner.result import Result, Status

KINDS = ("kernels", "dispatch", "packed")


@dataclass(frozen=True)
class Measured:
    """One `hal-attn bench KIND`: how it ended, and what it found; `old` are the figures it was compared with."""

    kind: str
    done: process.Completed
    new: Mapping[str, Any]
    old: Mapping[str, Any]

    @property
    def broken(self) -> str:
        """Why it gave no figures, or wrong ones; empty where it did well, however slow."""
        if not self.new:
            return f"{self.kind}: no figures, {self.done.ending}, {self.done.verdict}"
        if not self.new["ok"] or self.done.returncode not in (0, 1 if self.old else 0):
            return f"{self.kind}: {self.done.ending}, {self.done.verdict}"
        return ""

    def slower(self, ratio: float) -> list[str]:
        """Rows of ours that take more than `ratio` times as long as before, or run no longer."""
        found, before = [], _times(self.old)
        for key, now in _times(self.new).items():
            then = before.get(key)
            if then and now is None:
                found.append(f"{self.kind} {key} no longer runs")
            elif then and now is not None and now / then > ratio:
                found.append(f"{self.kind} {key} {now / then:.2f}x")
        return found


def check(options: Options, environment: Environment) -> Result:
    """Fail where a measurement does not run; a slowdown is named, and fails only where the options say so."""
    if options.simulation:
        return Result("bench", Status.NOT_RUN, "a simulation's speed says nothing")
    kept = (options.figures or options.out / "figures").resolve() / machine_kind(options)
    measured = [_measure(kind, kept, options, environment) for kind in KINDS]
    seconds = sum(each.done.seconds for each in measured)
    files = tuple(_file(each.kind) for each in measured if each.new)
    remedy = f"read {options.log_folder / 'bench.log'}"
    if broken := [each.broken for each in measured if each.broken]:
        return Result("bench", Status.FAILED, "; ".join(broken), remedy, seconds, files)
    slower = [row for each in measured for row in each.slower(options.slowdown)]
    said = _keep(measured, kept, options)
    if slower:
        said = f"SLOWER than {options.slowdown:g}x in {len(slower)} of the rows: {'; '.join(slower[:5])}; {said}"
    if slower and options.fail_on_slowdown:
        remedy = "run it again on a quiet machine; --keep-figures takes the new times where they are meant"
        return Result("bench", Status.FAILED, said, remedy, seconds, files)
    return Result("bench", Status.PASSED, said, "", seconds, files)


def _file(kind: str) -> str:
    return f"bench-{kind}.json"


def _measure(kind: str, kept: Path, options: Options, environment: Environment) -> Measured:
    file, old = options.out / _file(kind), kept / f"{kind}.json"
    command = [str(environment.python), "-m", "hal_attn.cli", "bench", kind, "--json", str(file)]
    if old.exists():
        command += ["--compare", str(old), "--slower", str(options.slowdown), "--anyway"]
    done = process.run(
        command,
        options.log_folder / "bench.log",
        variables=chosen(options, environment),
        folder=ROOT,
        timeout_minutes=options.timeout_minutes,
    )
    return Measured(kind, done, _read(file), _read(old))


def _read(file: Path) -> Mapping[str, Any]:
    """A file of figures; empty where it is not there or not whole."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) and {"ok", "measure", "rows"} <= content.keys() else {}


def _times(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """Time of each row that is ours; None where it was refused."""
    return {row["key"]: row[figures["measure"]] for row in figures.get("rows", ()) if row["ours"]}


def _keep(measured: Sequence[Measured], kept: Path, options: Options) -> str:
    """Keep the first figures of a kind of machine, and later ones only where that is asked for; what was done."""
    first = [each.kind for each in measured if not each.old]
    taken = [each.kind for each in measured if options.keep_figures or not each.old]
    kept.mkdir(parents=True, exist_ok=True)
    for kind in taken:
        shutil.copyfile(options.out / _file(kind), kept / f"{kind}.json")
    compared = [each.kind for each in measured if each.old]
    said = [f"{', '.join(compared)} compared with the figures of {kept.name}"] if compared else []
    said += [f"first figures of {kept.name}: {', '.join(first)}"] if first else []
    said += ["new figures kept"] if options.keep_figures and compared else []
    return ", ".join(said)
