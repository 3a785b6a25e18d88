"""What the tests of the command line share: a run within this process, and one in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from hal_attn.cli import make_app

WIDTH = 80


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `hal-attn *arguments` here, 80 columns wide, where fakes can take the place of the installed platforms."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return lambda *arguments: CliRunner().invoke(make_app(), arguments, prog_name="hal-attn")


@pytest.fixture
def spawn() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m hal_attn.cli *arguments` with these variables besides, its output in pipes."""

    def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
        return subprocess.run(
            [sys.executable, "-m", "hal_attn.cli", *arguments],
            capture_output=True,
            text=True,
            env={**kept, "COLUMNS": str(WIDTH), **variables},
            timeout=120,
        )

    return start


def assert_plain(text: str) -> None:
    """Readable in a pipe: no line over 80 columns, no colour codes, no word cut off, no blanks at line ends."""
    assert "\x1b" not in text
    assert "…" not in text
    for line in text.splitlines():
        assert len(line) <= WIDTH
        assert line == line.rstrip()


def words(text: str) -> str:
    """The words of a wrapped text in one line, so that a sentence is found wherever it was wrapped."""
    return " ".join(text.split())
