"""What a measurement leaves: one file format for all of them, written as JSON and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hal_attn.errors import InvalidAttentionInputError
from hal_attn.written import BENCH, kind_of

FORMAT = 1
JsonRow = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """One measurement.

    Attributes:
        kind: the verb of `hal-attn bench` that made it.
        measure: the field of a row that is compared with an older file: "ms" or "us", the lower the better.
        facts: machine, device, versions, settings and command, by name.
        rows: what was measured. Each row has a `key` of its own, `ours` (a peer's is not compared), and `measure`, None
            where it was refused.
        notes: what a reader should know besides, such as peers that are not installed.
        ok: nothing of ours is wrong.
    """

    kind: str
    measure: str
    facts: dict[str, str]
    rows: tuple[JsonRow, ...]
    notes: tuple[str, ...] = ()
    ok: bool = True

    def as_json(self) -> dict[str, Any]:
        """For a file; what is not a finite number is null."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "ok": self.ok,
            "measure": self.measure,
            "facts": self.facts,
            "notes": list(self.notes),
            "rows": [{name: _finite(value) for name, value in row.items()} for row in self.rows],
        }

    def json(self) -> str:
        """The same as text, a line a row."""
        content = self.as_json()
        rows = ",\n  ".join(json.dumps(row) for row in content.pop("rows"))
        body = json.dumps(content, indent=1).rstrip("}\n")
        return f'{body},\n "rows": [\n  {rows}\n ]\n}}'


def read_report(path: Path, flag: str, kinds: Sequence[str]) -> Report:
    """The report in a file.

    Raises:
        InvalidAttentionInputError: no file, or none of this format; `flag` is who named it.
    """
    allowed = f"a file that `hal-attn bench ... --json` wrote, of format {FORMAT}, of {', '.join(kinds)}"
    remedy = f"A run of ci/run leaves them as bench-{kinds[0]}.json and the like"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (kind := kind_of(content)) != BENCH:
            raise ValueError(f"this is {kind}")
        if content["format"] != FORMAT or content["kind"] not in kinds:
            raise ValueError(f"format {content['format']}, kind {content['kind']}")
        rows = tuple(dict(row) for row in content["rows"])
        measure, ok = str(content["measure"]), bool(content["ok"])
        if not all(isinstance(row["key"], str) and row[measure] != "" for row in rows):
            raise ValueError("a row whose key is no text")
        return Report(content["kind"], measure, dict(content["facts"]), rows, tuple(content["notes"]), ok)
    except OSError as error:
        reason = str(error.strerror)
    except KeyError as error:
        reason = f"there is no {error} in it"
    except (ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
    raise InvalidAttentionInputError(flag, f"{path} ({reason})", allowed, remedy)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
