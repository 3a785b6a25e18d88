"""`hal-attn tuning`: the choices that HAL_ATTN_AUTOTUNE measured and kept, and a way to drop them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from hal_attn.cli import output
from hal_attn.settings import read
from hal_attn.tuning.kept import KeptFile, all_kept
from hal_attn.tuning.record import Record


def tuning(
    drop: Annotated[bool, typer.Option("--drop", help="Remove them; the next calls are measured again.")] = False,
    as_json: output.Json = False,
) -> None:
    """Show every measured choice that is kept: for which device and versions, for which calls, and how fast each
    backend was. --drop removes them all."""
    folder = read().cache_path
    found = all_kept(folder)
    if drop:
        for file in found:
            file.path.unlink(missing_ok=True)
    if as_json:
        output.print_json(_json(folder, found, drop))
    else:
        _print(folder, found, drop)


def _json(folder: Path, found: list[KeptFile], dropped: bool) -> dict[str, object]:
    return {
        "folder": str(folder),
        "dropped": dropped,
        "files": [
            {
                "path": str(file.path),
                "identity": dict(file.identity),
                "problem": file.problem or None,
                "classes": {name: record.json() for name, record in file.records.items()},
            }
            for file in found
        ],
    }


def _print(folder: Path, found: list[KeptFile], dropped: bool) -> None:
    for file in found:
        facts: dict[str, RenderableType] = {"File": os.fspath(file.path), **dict(file.identity)}
        if file.problem:
            facts["WRONG"] = file.problem
        calls = [_told(name, record) for name, record in file.records.items()]
        output.show(output.fields(facts), output.bullets(calls), "")
    kept = f"{len(found)} file{'' if len(found) == 1 else 's'} of measured choices in {folder}"
    output.show(f"Dropped {kept}." if dropped and found else f"{kept}.")


def _told(name: str, record: Record) -> str:
    times = ", ".join(f"{backend} {milliseconds:.4g} ms" for backend, milliseconds in record.milliseconds)
    reasons = [f"{backend} left out: {reason}" for backend, reason in record.left_out]
    return "\n".join([name, f"{times} ({record.rounds} rounds, {record.when})", *reasons])
