"""The project over an interpreter that has PyTorch: for a machine where pip reaches no index.

It is a virtual environment that sees the interpreter's packages, and in which the repository is on the path. Entry
points are found through a `.dist-info` folder. pip writes it, but without an index it cannot build the project, so the
folder is written here, from pyproject.toml.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from runner import process, venvs
from runner.environment import Environment, NoEnvironment, joined, variables_of
from runner.options import Options
from runner.platforms import ROOT

# What the tests cannot do without, besides what the package requires.
NEEDED = ("pytest", "hypothesis")


def make(options: Options, why: str) -> Environment:
    """The first interpreter with PyTorch and the project over it; `why` says why pip installs nothing."""
    python = _with_torch(options)
    if python is None:
        remedy = "give pip an index, or name an interpreter that has PyTorch with --python"
        raise NoEnvironment(f"{why}; and no interpreter here has PyTorch", remedy)
    folder = options.environments.resolve() / f"overlay-{options.platform.name}"
    own = venvs.create(python, folder, with_pip=False)
    venvs.lay_over(python, folder)
    site = venvs.site_packages(folder)
    # Read in the order of their names: the repository comes before a checkout that the interpreter may know.
    (site / "0-repository.pth").write_text(f"{ROOT}\n{ROOT / 'platforms'}\n", encoding="utf-8")
    if options.wheels is not None:
        _unpack(site, python, options.wheels, options.log_folder / "environment.log")
    project = _project()
    _write_metadata(site, project)
    _write_commands(own, project)
    variables = variables_of(options.platform, simulated=bool(options.simulation))
    variables |= {"PATH": joined(own.parent, variables.get("PATH")), "VIRTUAL_ENV": str(folder)}
    environment = Environment(own, variables, why, python)
    if missing := environment.lacking(*_required(project), *NEEDED):
        remedy = f"carry them as wheels: pip download --dest wheels {' '.join(missing)}, then --wheels wheels"
        raise NoEnvironment(f"{why}; and {python} lacks {', '.join(missing)}", remedy)
    return environment


def _with_torch(options: Options) -> str | None:
    """The interpreter named, else the one that runs this, else those on the path: the first that has PyTorch."""
    named = [options.python] if options.python else [sys.executable, *map(shutil.which, ("python3", "python"))]
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    for python in dict.fromkeys(filter(None, named)):
        if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0:
            return python
    return None


def _unpack(site: Path, python: str, wheels: Path, log: Path) -> None:
    found = sorted(wheels.resolve().glob("*.whl"))
    if not found:
        raise NoEnvironment(f"--wheels {wheels} has no wheel", "pip download --dest FOLDER NAME==VERSION ...")
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--target", str(site), *map(str, found)]
    done = process.run(command, log, variables=os.environ, folder=ROOT, timeout_minutes=15)
    if not done.ok:
        remedy = "each wheel must fit this Python and machine, and each package be there once"
        raise NoEnvironment(f"the wheels of {wheels} do not install: {done.verdict}", remedy)


def _project() -> dict[str, Any]:
    """The table `[project]` of pyproject.toml."""
    try:
        toml = importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10 has no tomllib, but pip brings one.
        toml = importlib.import_module("pip._vendor.tomli")
    project: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def _required(project: dict[str, Any]) -> list[str]:
    """The modules of the packages that the project requires; each has the package's name."""
    return [re.split(r"[^A-Za-z0-9_]", requirement, maxsplit=1)[0].lower() for requirement in project["dependencies"]]


def _version() -> str:
    """The project's version, read and not imported, for that would import PyTorch."""
    text = (ROOT / "hal_attn" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    assert match is not None
    return match[1]


def _write_metadata(site: Path, project: dict[str, Any]) -> None:
    folder = site / f"{project['name'].replace('-', '_')}-{_version()}.dist-info"
    folder.mkdir()
    required = "".join(f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"])
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {_version()}\n"
    (folder / "METADATA").write_text(head + required, encoding="utf-8")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def _write_commands(python: Path, project: dict[str, Any]) -> None:
    for name, target in project["scripts"].items():
        module, _, function = target.partition(":")
        script = python.parent / name
        script.write_text(f"#!{python}\nfrom {module} import {function}\n\n{function}()\n", encoding="utf-8")
        script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
