"""The outside vendor's package, installed and run as a stranger would: wheels, a fresh environment, the commands.

Nothing is downloaded: the environment sees PyTorch and the other requirements of the interpreter that runs the tests.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import words

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "vendor_plugin"
# What a plugin may build on; the rest of hal_attn may change without notice.
CONTRACT = ("kernels", "portable", "probing", "simulation", "testing")


class Environment:
    """A virtual environment with both packages; `run` runs one of its commands in an empty folder."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.scripts / "python"
        self.home = folder / "home"
        self.home.mkdir()
        self.packages = Path(
            self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        )

    def run(self, command: str, *arguments: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HAL_ATTN_"))}
        path = f"{self.scripts}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [shutil.which(command, path=path) or command, *arguments],
            env={**kept, "PATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **variables},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done


def build(project: Path, folder: Path) -> None:
    """A source distribution, and from it a wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributions")
    build(ROOT, folder)
    # Built where a stranger has it, outside this repository.
    copy = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("vendor") / "hal-attn-acme")
    build(copy, folder)
    return folder


@pytest.fixture(scope="module")
def environment(distributions, tmp_path_factory):
    made = Environment(tmp_path_factory.mktemp("environment"))
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(made.python),
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*install, *map(str, sorted(distributions.glob("*.whl")))], check=True, timeout=300)
    # Only now, so that pip takes nothing that is there for what it has to install.
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (made.packages / "of_the_tests.pth").write_text("\n".join(seen) + "\n")
    return made


def test_the_example_is_in_the_source_distribution_and_not_in_the_wheel(distributions):
    with tarfile.open(next(distributions.glob("hal_attn-*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert "docs/examples/vendor_plugin/pyproject.toml" in names
    assert "docs/examples/vendor_plugin/src/hal_attn_acme/platform.py" in names
    with zipfile.ZipFile(next(distributions.glob("hal_attn-*.whl"))) as wheel:
        assert not [name for name in wheel.namelist() if "acme" in name or "example" in name]
    with zipfile.ZipFile(next(distributions.glob("hal_attn_acme-*.whl"))) as wheel:
        assert {name.partition("/")[0] for name in wheel.namelist()} == {
            "acme_torch",
            "hal_attn_acme",
            "hal_attn_acme-0.1.0.dist-info",
        }


def test_what_runs_is_what_was_installed(environment):
    code = (
        "import hal_attn, hal_attn_cpu, hal_attn_acme as a; print(hal_attn.__file__, hal_attn_cpu.__file__, a.__file__)"
    )
    for file in environment.run("python", "-c", code).stdout.split():
        assert environment.packages in Path(file).parents


def test_doctor_shows_the_platform(environment):
    text = words(environment.run("hal-attn", "doctor").stdout)
    assert "acme usable 1 Acme device through torch.acme acme:0: Acme One (the CPU under another name), acme1" in text
    for name in ("acme_fused", "acme_packed", "torch_math"):
        assert f"{name} acme usable" in text
    assert "cpu_flash cpu usable" in text
    assert text.partition("All is well: ")[2].startswith("cpu, acme usable")


def test_a_call_on_its_device_takes_its_backend(environment):
    found = json.loads(
        environment.run("hal-attn", "explain", "--device", "acme", "--dtype", "float32", "--json").stdout
    )
    assert (found["platform"]["name"], found["chosen"]) == ("acme", "acme_packed")
    text = words(environment.run("hal-attn", "explain", "--device", "acme", "--heads", "129", status=1).stdout)
    assert text.count("heads: have 129, need at most 128 heads, a limit of the device") == 3
    # The second block of the README, as it stands there.
    script, said = re.search(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.S
    ).groups()
    assert environment.run("python", "-c", script).stdout == said


def test_the_ci_call_passes_and_leaves_its_reports(environment, tmp_path):
    project = shutil.copytree(EXAMPLE, tmp_path / "hal-attn-acme")
    done = environment.run("sh", str(project / "ci" / "run"), str(tmp_path / "results"))
    report = json.loads((tmp_path / "results" / "conformance.json").read_text())
    assert report["ok"], done.stdout
    checked = [backend for backend in report["backends"] if backend["checks"]]
    assert {(backend["name"], backend["simulated"]) for backend in checked} == {
        ("acme_fused", False),
        ("acme_packed", False),
        ("torch_math", False),
    }
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "tests.xml",
        "conformance.xml",
        "conformance.json",
        "conformance.html",
    }


def test_the_kit_runs_as_tests_of_the_package(environment, tmp_path):
    project = shutil.copytree(EXAMPLE, tmp_path / "hal-attn-acme")
    tests = [str(project / "tests" / "test_conformance.py"), "-k", "TestPacked", "--rootdir", str(project)]
    out = environment.run("python", "-m", "pytest", "-c", str(project / "pyproject.toml"), *tests).stdout
    assert int(re.search(r"(\d+) passed", out)[1]) > 100


def test_the_ci_call_fails_without_the_device(environment, tmp_path):
    project = shutil.copytree(EXAMPLE, tmp_path / "hal-attn-acme")
    call = ["sh", str(project / "ci" / "run"), str(tmp_path / "results")]
    out = environment.run(*call, status=1, ACME_VISIBLE_DEVICES="-1").stdout
    assert "ACME_VISIBLE_DEVICES='-1' hides every Acme device" in words(out)
    # The first step has failed already.
    assert list((tmp_path / "results").iterdir()) == []
    verify = ["hal-attn", "verify", "--platform", "acme", "--require-hardware"]
    out = environment.run(*verify, status=1, ACME_VISIBLE_DEVICES="-1").stdout
    assert "ACME_VISIBLE_DEVICES='-1' hides every Acme device" in words(out)


@pytest.mark.parametrize(
    ("given", "folder", "effort"),
    [
        ([], "results", "--quick"),
        (["--full"], "results", "--full"),
        (["found", "--full"], "found", "--full"),
        (["--full", "found"], "found", "--full"),
    ],
)
def test_the_ci_call_takes_its_flag_in_any_place(tmp_path, given, folder, effort):
    project = shutil.copytree(EXAMPLE, tmp_path / "hal-attn-acme")
    for name in ("hal-attn", "python"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text('#!/bin/sh\necho "$@"\n')
        command.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    run = ["sh", str(project / "ci" / "run"), *given]
    out = subprocess.run(run, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True).stdout
    assert f"verify --platform acme --require-hardware {effort} --junit {folder}/conformance.xml" in out
    assert (project / folder).is_dir()


def test_the_ci_call_names_what_it_does_not_know(tmp_path):
    project = shutil.copytree(EXAMPLE, tmp_path / "hal-attn-acme")
    run = ["sh", str(project / "ci" / "run"), "--fast"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "ci/run: got --fast; allowed: [FOLDER] [--full]\n")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise OSError('libacme.so: cannot open')", "OSError: libacme.so: cannot open"),
        ("AcmePlatform.api_version = 2", "it was written for version 2 of the platform contract"),
        ("AcmePlatform.name = 'cuda'", "the entry point is called acme, the platform cuda"),
        ("AcmePlatform.backends = lambda self: 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_once_broken_it_is_named_and_the_others_go_on(environment, fault, reason):
    file = environment.packages / "hal_attn_acme" / "platform.py"
    kept = file.read_text()
    file.write_text(f"{kept}\n{fault}\n")
    try:
        doctor = words(environment.run("hal-attn", "doctor", status=1).stdout)
        code = "import torch, hal_attn; print(hal_attn.attention(*[torch.ones(1, 2, 3, 4)] * 3).sum().item())"
        answer = environment.run("python", "-c", code).stdout
    finally:
        file.write_text(kept)
    assert "acme BROKEN broken plugin: " in doctor
    assert reason in doctor
    assert "the plugin acme is broken; reinstall or remove hal-attn-acme 0.1.0" in doctor
    assert "cpu_flash cpu usable" in doctor
    assert float(answer) == 24.0


def test_it_builds_on_the_contract_alone():
    imported = {name for file in EXAMPLE.rglob("*.py") for name in _imports(file) if name.startswith("hal_attn")}
    own = {name for name in imported if name.partition(".")[0] == "hal_attn_acme"}
    allowed = re.compile(rf"hal_attn(\.({'|'.join(CONTRACT)})(\..+)?)?")
    assert {"hal_attn", "hal_attn.kernels"} <= imported
    assert [name for name in sorted(imported - own) if not allowed.fullmatch(name)] == []


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
