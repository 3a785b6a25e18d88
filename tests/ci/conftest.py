"""What the tests of `ci/run` share: a run in a process of its own, and options for one step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from runner.options import Options
from runner.platforms import PLATFORMS

ROOT = Path(__file__).parents[2]
# pip reads these before its files; without an index it reaches nothing, as on a machine without a network.
NO_NETWORK = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


def wheel(folder: Path, name: str = "carried", tag: str = "py3-none-any", code: str = "VALUE = 7") -> Path:
    """A wheel of one module, `code`."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-{tag}.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"{code}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def ci_run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `ci/run *arguments` with its report and environments in `tmp_path`, from this interpreter."""

    def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name != "GITHUB_STEP_SUMMARY"}
        where = ["--out", str(tmp_path / "out"), "--environments", str(tmp_path / "environments")]
        return subprocess.run(
            [ROOT / "ci" / "run", *arguments, *where],
            capture_output=True,
            text=True,
            env={**kept, "PYTHON": sys.executable, **variables},
            timeout=300,
            check=False,
        )

    return start


@pytest.fixture
def report(tmp_path: Path) -> Callable[[], dict[str, dict[str, object]]]:
    """The steps of the last run's report.json, by name."""

    def read() -> dict[str, dict[str, object]]:
        content = json.loads((tmp_path / "out" / "report.json").read_text())
        return {step["step"]: step for step in content["steps"]}

    return read


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., Options]:
    """Options of a run of one platform, its files in `tmp_path`."""

    def make(platform: str, **others: object) -> Options:
        (tmp_path / "out").mkdir(exist_ok=True)
        where = {"out": tmp_path / "out", "environments": tmp_path / "environments"}
        return Options(PLATFORMS[platform], **{**where, **others})

    return make
