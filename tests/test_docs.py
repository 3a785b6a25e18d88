"""The documentation is true: its Python runs and prints what it says, its screens and tables are those of the code.

How a page is read: the `python` blocks of a page run in order, in one namespace; a `text` block right after one is what
it prints. A `console` block that begins with `$ hal-attn explain` is run too, and so is `$ hal-attn doctor` under a
simulation; variables may stand before the command, and a line `...` stands for lines that are left out. The blocks of
the vendor tutorial are files of the example, which `plugins/test_installation.py` installs and runs. `docs_tables`
makes the tables, `docs_files` that code.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import hal_attn
from hal_attn.cli import make_app
from hal_attn.settings import VARIABLES
from tests import docs_files, docs_tables
from tests.cuda import hardware

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "bring-a-vendor.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """One fenced block; `follows` where nothing but blank lines parts it from the block before."""

    language: str
    text: str
    line: int
    follows: bool


def blocks(page: Path) -> list[Block]:
    found, end = [], None
    text = page.read_text()
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        follows = end is not None and not text[end : match.start()].strip()
        found.append(Block(match[1], match[2], text.count("\n", 0, match.start()) + 1, follows))
        end = match.end()
    return found


def output_of(block: Block, after: Block | None) -> str | None:
    """What the page says that `block` prints; None where it does not say."""
    return after.text if after is not None and after.follows and after.language == "text" else None


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page != TUTORIAL], ids=name_of)
@mock.patch.dict(os.environ)  # A page may set variables.
def test_python_runs_and_prints_what_stands_below_it(page, capsys):
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "page"}
    for block, after in itertools.pairwise([*blocks(page), None]):
        if block.language != "python":
            continue
        # Blank lines in front, so that a traceback shows the page's own line.
        exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
        printed, said = capsys.readouterr().out, output_of(block, after)
        assert said is None or printed == said, f"{page.name} line {block.line} prints\n{printed}"


@pytest.mark.parametrize(("place", "text"), docs_files.places(), ids=lambda part: part[:60])
def test_the_vendor_tutorial_shows_the_example(place, text):
    assert text == docs_files.block(place), "python -m tests.docs_files would write it into the page"


def test_every_block_of_the_vendor_tutorial_is_the_example_s():
    of_files = [text for _, text in docs_files.places()]
    shown = [block.text for block in blocks(TUTORIAL) if block.language != "console"]
    assert len(shown) == len(of_files) > 5


SCREEN = re.compile(r"\$ ((?:HAL_ATTN_\w+=\S+ )*)hal-attn ((?:explain|doctor)\b.*)")


def screens() -> list[tuple[str, str, str, str]]:
    """(page, variables, flags, output) of each screen that says the same on every machine."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            command, _, shown = block.text.partition("\n")
            match = SCREEN.fullmatch(command) if block.language == "console" else None
            if match is not None and (match[2].startswith("explain") or "HAL_ATTN_SIMULATE" in match[1]):
                found.append((name_of(page), match[1], match[2], shown))
    return found


@pytest.mark.parametrize(("page", "variables", "command", "shown"), screens())
def test_screens_are_what_the_command_prints(page, variables, command, shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for assignment in variables.split():
        monkeypatch.setenv(*assignment.split("=", 1))
    result = CliRunner().invoke(make_app(), command.split(), prog_name="hal-attn")
    right = r"(?:.*\n)*".join(map(re.escape, re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)))
    assert re.fullmatch(right, result.output), f"{page} says otherwise than\n{result.output}"


def test_there_are_pages_blocks_and_screens_to_check():
    names = {page.name for page in pages_with("python")}
    assert names >= {"README.md", "semantics.md", "architecture.md", "environment.md", TUTORIAL.name}
    assert {"README.md", "docs/simulation.md"} <= {page for page, *_ in screens()}


@pytest.mark.parametrize(("page", "name", "text"), docs_tables.places(), ids=lambda part: str(part)[:40])
def test_tables_are_those_of_the_code(page, name, text):
    right = docs_tables.TABLES[name]()
    assert text == right, f"python -m tests.docs_tables would write into {page.name}\n\n{right}"


def test_every_table_has_a_place():
    names = [name for _, name, _ in docs_tables.places()]
    assert sorted(names) == sorted(docs_tables.TABLES)


def test_what_the_hardware_run_prints_is_taken_into_the_data(tmp_path, monkeypatch):
    cells = {
        ("torch_flash", "packed, causal"): "output, LSE",
        ("torch_flash", "mask"): "refused: mask: have a bool mask, need no mask",
        ("torch_cudnn", "packed, causal"): "WRONG: AssertionError: LSE",
        ("torch_cudnn", "mask"): "output, LSE, gradients",
    }
    data = tmp_path / "run.json"
    data.write_text('{"cells": {"mask": {"torch_math": "OLG", "torch_flash": "OLG"}}, "chosen": {}}')
    monkeypatch.setattr(docs_tables, "RUN", data)
    docs_tables.take("\n".join(["a warning", *hardware.table(cells), "", "B1 S16 H2/2 D64 causal: torch_flash", ""]))
    assert json.loads(data.read_text()) == {
        "cells": {
            "mask": {"torch_math": "OLG", "torch_cudnn": "OLG", "torch_flash": cells["torch_flash", "mask"]},
            "packed, causal": {"torch_cudnn": "WRONG: AssertionError: LSE", "torch_flash": "OL"},
        },
        "chosen": {"B1 S16 H2/2 D64 causal": "torch_flash"},
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_variable_named_exists(page):
    named = set(re.findall(r"HAL_ATTN_[A-Z_]*[A-Z]", page.read_text()))
    assert named <= {variable.name for variable in VARIABLES}


def test_the_readme_names_every_variable_and_the_index_every_public_name():
    readme, index = (ROOT / "README.md").read_text(), (DOCS / "index.md").read_text()
    assert [variable.name for variable in VARIABLES if f"`{variable.name}`" not in readme] == []
    assert [name for name in hal_attn.__all__ if f"`{name}`" not in index] == []


@pytest.mark.parametrize("page", [*PAGES, *sorted(DOCS.glob("examples/**/*.md"))], ids=name_of)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(file), f"{target}: {file.name} has no such heading"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: lower case, words joined by hyphens, signs left out."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_target_named_exists(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", page.read_text())) <= targets


def test_the_changelog_has_this_version():
    assert f"## [{hal_attn.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_sequence_parallel_example_is_the_page_s_and_runs():
    script = DOCS / "examples" / "sequence_parallel.py"
    (block,) = (block for block in blocks(DOCS / "sequence-parallel.md") if block.language == "py")
    assert script.read_text().endswith(block.text)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    difference = float(done.stdout.rsplit(":", 1)[1])
    assert difference < 1e-5
