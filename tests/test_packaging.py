"""The wheel: what a user who installs it gets. The source distribution: all that its tests read."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLATFORMS = ("hal_attn_cpu", "hal_attn_cuda", "hal_attn_rocm", "hal_attn_ascend")
PACKAGES = ("hal_attn", "hal_attn_pytest", *PLATFORMS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("hal_attn-*.whl"))) as archive:
        yield archive


def test_every_package_is_in_the_wheel_and_typed(wheel):
    names = wheel.namelist()
    for package in PACKAGES:
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
        assert package not in PLATFORMS or f"{package}/platform.py" in names
    assert {name.partition("/")[0] for name in names if not name.startswith("hal_attn-")} == set(PACKAGES)
    assert "hal_attn/demo/data/alice.txt" in names
    assert "hal_attn_pytest/suite.py" in names
    assert {"hal_attn/testing/templates/report.html", "hal_attn/testing/templates/report.css"} <= set(names)


def test_the_wheel_declares_platforms_and_command(wheel):
    entry_points = wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode()
    for line in ("hal-attn = hal_attn.cli:main", "[hal_attn.platforms]", "cpu = hal_attn_cpu.platform:CpuPlatform"):
        assert line in entry_points
    assert "[pytest11]\nhal_attn = hal_attn_pytest\n" in entry_points
    for vendor in ("cuda", "rocm", "ascend"):
        assert f"{vendor} = hal_attn_{vendor}.platform:" in entry_points


def test_only_pytorch_and_small_packages_are_required(wheel):
    metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
    required = {
        line.removeprefix("Requires-Dist: ").partition(">")[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert required == {"torch", "filelock", "jinja2", "platformdirs", "rich", "typer"}


def test_what_the_tests_read_is_in_the_source_distribution(tmp_path):
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("hal_attn-*.tar.gz"))) as archive:
        names = {name.split("/")[1] for name in archive.getnames()}
    read = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r'ROOT / "([\w.-]+)"', path.read_text())
    }
    assert {".ci", ".github", "ci", "docs", "README.md"} <= read
    # A development environment is looked for, and not needed.
    assert read - {".venv"} - names == set()


def test_every_hint_to_install_names_an_extra_of_this_package(wheel):
    extras = set(re.findall(r"^Provides-Extra: (.+)$", wheel.read(_metadata(wheel)).decode(), re.MULTILINE))
    files = [file for folder in PACKAGES for file in _sources(folder)] + [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    hinted = [name for file in files for name in re.findall(r"(?:hal-attn|\.)\[([a-z,-]+)\]['\"`]", file.read_text())]
    assert {name for names in hinted for name in names.split(",")} >= {"cuda", "rocm", "ascend", "demo", "bench"}
    assert {name for names in hinted for name in names.split(",")} <= extras


def _metadata(wheel):
    return next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))


def _sources(package):
    return next(place for place in (ROOT / package, ROOT / "platforms" / package) if place.is_dir()).rglob("*.py")
