"""The tables of the documentation that come from the code, or from a run on a device.

`python -m tests.docs_tables` writes them into the pages, between `<!-- table: NAME -->` and `<!-- end -->`; `test_docs`
holds the pages to them. Files named after it, with what `python -m tests.cuda.hardware` printed, go into
`docs/data/h200-backends.json` first. The device and the versions in there are written by hand.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from hal_attn_ascend.simulation import platform as ascend
from hal_attn_cpu.platform import CpuPlatform
from hal_attn_cuda.order import LAST, TABLE, Row
from hal_attn_cuda.simulated import platform as cuda
from hal_attn_rocm.simulated import platform as rocm

from hal_attn import explain
from hal_attn.capabilities import Capabilities
from hal_attn.settings import VARIABLES
from hal_attn.simulation.spec import EMPTY_LSE
from hal_attn.testing import RULES
from tests import arguments
from tests.cuda.hardware import BACKENDS
from tests.sequence_parallel import coverage

DOCS = Path(__file__).parents[1] / "docs"
RUN = DOCS / "data" / "h200-backends.json"
PLACE = re.compile(r"<!-- table: ([^\n]*) -->\n(.*?)<!-- end -->", re.DOTALL)
KINDS = {"batched": False, "packed": True}
CUDA = {"cuda:sm90": 9, "cuda:sm100": 10, "cuda:sm80": 8, "cuda:sm120": 12}


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *body)) + "\n"


def code(name: str) -> str:
    return f"`{name}`"


def variables() -> str:
    """The environment variables."""
    rows = [(code(v.name), v.values, v.default or "not set", v.meaning) for v in VARIABLES]
    return table(("Name", "Values", "Default", "Meaning"), *rows)


def capabilities() -> str:
    """What the backends of the CPU claim."""
    backends = CpuPlatform().backends()
    rows = [(code(f.name), *(_claim(getattr(b.capabilities, f.name)) for b in backends)) for f in fields(Capabilities)]
    return table(("Capability", *(code(backend.name) for backend in backends)), *rows)


def conformance_rules() -> str:
    """The rules of the conformance kit."""
    return table(("Rule", "What it says"), *RULES.items())


def _claim(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return ", ".join(sorted(str(part).removeprefix("torch.") for part in value)) or "none"
    return "any" if value is None else str(value)


def honoured(platform: str) -> str:
    """Argument by backend. Backends that the device cannot run have no column."""
    names = [name for name in arguments.backends_of(platform) if _calls(platform, name)]
    rows = []
    with arguments.simulating(platform):
        for argument in arguments.arguments(False, torch.float32):
            rows.append((code(argument), *(_verdict(name, _calls(platform, name), argument) for name in names)))
    return table(("Argument", *map(code, names)), *rows)


def _calls(platform: str, backend: str) -> list[str]:
    return [kind for kind in KINDS if arguments.has_calls(platform, backend, KINDS[kind])]


def _verdict(backend: str, calls: list[str], argument: str) -> str:
    able = [kind for kind in calls if argument in arguments.arguments(KINDS[kind], torch.float32)]
    found = [kind for kind in able if arguments.verdict(backend, KINDS[kind], argument) == "honoured"]
    if not able:
        return "-"
    return "yes" if found == able else found[0] if found else "refused"


def orders() -> str:
    """The default order of each device, and where it comes from."""
    rows = [_order(device, row.calls, (*row.order, *LAST), row.source) for device, row in _cuda_rows()]
    query = torch.empty(1, 4096, 1, 64, dtype=torch.float16)
    for device in (*(f"rocm:{name}" for name in rocm.GENERATIONS), "ascend"):
        with mock.patch.dict(os.environ, {"HAL_ATTN_SIMULATE": device}):
            found = explain(query, query, query)
        names = [candidate.backend.name for candidate in found.considered]
        rows.append(_order(device, "every", names, found.order_source))
    return table(("Device", "Calls", "Tried in this order", "Source"), *rows)


def _order(device: str, calls: str, names: Iterable[str], source: str) -> tuple[str, ...]:
    return code(device), calls, ", ".join(map(code, names)), source


def _cuda_rows() -> Iterator[tuple[str, Row]]:
    """The rows of NVIDIA's table that count for each device."""
    for device, generation in CUDA.items():
        own = [row for row in TABLE if generation in row.generations]
        yield from ((device, row) for row in own or [row for row in TABLE if not row.generations])


def simulations() -> str:
    """What may follow the vendor's name in HAL_ATTN_SIMULATE; defaults first."""
    rows = []
    for name, module in (("ascend", ascend), ("rocm", rocm), ("cuda", cuda)):
        given = {**module.CHOICES, "empty_lse": tuple(EMPTY_LSE)}
        texts = [f"{code(choice)}: {', '.join(filter(None, values))}" for choice, values in given.items()]
        rows.append((code(name), ", ".join(map(code, module.GENERATIONS)), "; ".join(texts)))
    return table(("Vendor", "Generations", "Choices"), *rows)


def hardware() -> str:
    """The backends on the H200: what each call gave, or the rule that refused it."""
    run = json.loads(RUN.read_text())
    names = list(dict.fromkeys(name for cells in run["cells"].values() for name in cells))
    rows = [(call, *(_outcome(cells.get(name, "")) for name in names)) for call, cells in run["cells"].items()]
    every = [(call, name, text) for call, cells in run["cells"].items() for name, text in cells.items()]
    wrong = [f"- {code(name)}, {call}: {text}" for call, name, text in every if text.startswith("WRONG")]
    text = f"{run['device']}; {', '.join(run['versions'])}; `{run['command']}`.\n\n"
    text += table(("Call", *map(code, names)), *rows)
    return text + "".join(f"\n{part}\n" for part in ("\n".join(wrong), run["note"]) if part)


def _outcome(text: str) -> str:
    kind, _, reason = text.partition(": ")
    return {"refused": f"*{reason.partition(':')[0]}*", "WRONG": "**wrong**"}.get(kind, kind)


def choices() -> str:
    """The backend that each measured shape gets by default on the H200."""
    run = json.loads(RUN.read_text())
    return table(("Shape", "Chosen"), *((shape, code(name)) for shape, name in run["chosen"].items()))


TABLES = {
    "variables": variables,
    "capabilities": capabilities,
    **{f"arguments {platform}": partial(honoured, platform) for platform in arguments.PLATFORMS},
    "orders": orders,
    "simulations": simulations,
    "h200 backends": hardware,
    "h200 choices": choices,
    "conformance rules": conformance_rules,
    "sequence parallel coverage": lambda: table(*coverage.rows()),
}


def places() -> list[tuple[Path, str, str]]:
    """(page, name, text) of each table in the pages."""
    pages = sorted(DOCS.glob("*.md"))
    return [(page, match[1], match[2]) for page in pages for match in PLACE.finditer(page.read_text())]


def write() -> None:
    """Write every table into its page."""
    for page in {page for page, *_ in places()}:
        page.write_text(PLACE.sub(_written, page.read_text()))


def _written(match: re.Match[str]) -> str:
    return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}<!-- end -->"


def take(printed: str) -> None:
    """Put what `tests.cuda.hardware` printed into the data: the backends in it anew, the others stay."""
    run = json.loads(RUN.read_text())
    lines = printed.splitlines()
    # The head has no call and 17 columns a backend, one blank apart; so have the rows, up to the first empty line.
    start = next(index for index, line in enumerate(lines) if line[:1] == " " and line.split()[0] in BACKENDS)
    names = lines[start].split()
    width = len(lines[start]) - 18 * len(names) + 1
    reasons = dict(re.findall(r"^(\w+, .+?): ((?:refused|WRONG|absent): .*)$", printed, re.MULTILINE))
    for cells in run["cells"].values():
        for name in names:
            cells.pop(name, None)
    for line in lines[start + 1 : lines.index("", start)]:
        call, marks = line[:width].strip(), [line[width + 18 * i :][:17].strip() for i in range(len(names))]
        for name, mark in zip(names, marks, strict=True):
            text = reasons.get(f"{name}, {call}", mark)
            if text and not text.startswith("absent"):
                run["cells"].setdefault(call, {})[name] = text
    run["chosen"] |= dict(re.findall(r"^((?:B\d|packed \d).*): (\w+)$", printed, re.MULTILINE))
    RUN.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    for file in sys.argv[1:]:
        take(Path(file).read_text())
    write()
