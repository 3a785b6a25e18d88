"""The project laid over an interpreter without pip's help: entry points, the command, and carried wheels."""

import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import pytest
import tomllib
from runner import overlay, venvs
from runner.environment import NoEnvironment, variables_of
from runner.platforms import ROOT

from tests.ci.conftest import wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def make(options, **others):
    return overlay.make(options("cpu", python=sys.executable, **others), "no network")


def test_the_metadata_is_what_pip_would_write(options, tmp_path):
    make(options)
    site = venvs.site_packages(tmp_path / "environments" / "overlay-cpu")
    (found,) = metadata.distributions(path=[str(site)])
    assert (found.name, found.version) == ("hal-attn", metadata.version("hal-attn"))
    points = {(point.group, point.name): point.value for point in found.entry_points}
    expected = {("console_scripts", name): target for name, target in PROJECT["scripts"].items()}
    for group, named in PROJECT["entry-points"].items():
        expected |= {(group, name): target for name, target in named.items()}
    assert points == expected
    assert set(found.requires) == set(PROJECT["dependencies"])


def test_the_command_runs_and_the_repository_is_imported(options, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    environment = make(options)
    command = tmp_path / "environments" / "overlay-cpu" / "bin" / "hal-attn"
    done = subprocess.run([command, "--version"], env=dict(environment.variables), capture_output=True, text=True)
    assert done.stdout == f"hal-attn {metadata.version('hal-attn')}\n", done.stderr
    where = "import hal_attn, hal_attn_cpu; print(hal_attn.__file__, hal_attn_cpu.__file__)"
    expected = (ROOT / "hal_attn" / "__init__.py", ROOT / "platforms" / "hal_attn_cpu" / "__init__.py")
    assert f"{environment.python}" != sys.executable
    assert environment.ask(where).split() == [str(path) for path in expected]


def test_carried_wheels_are_laid_over_it(options, tmp_path):
    wheel(tmp_path / "wheels")
    environment = make(options, wheels=tmp_path / "wheels")
    assert environment.ask("import carried; print(carried.VALUE)") == "7\n"
    assert environment.facts({"carried": "2.0"})["differ"] == ["carried 1.0 (pinned 2.0)"]


def test_wheels_that_do_not_fit_are_an_error(options, tmp_path):
    wheel(tmp_path / "wheels", tag="cp27-cp27m-win32")
    with pytest.raises(NoEnvironment, match="do not install: ERROR: carried-1"):
        make(options, wheels=tmp_path / "wheels")


def test_a_folder_without_wheels_is_an_error(options, tmp_path):
    with pytest.raises(NoEnvironment, match="has no wheel"):
        make(options, wheels=tmp_path)


def test_what_is_missing_is_named_with_the_way_to_carry_it(options, monkeypatch):
    monkeypatch.setattr(overlay, "NEEDED", ("pytest", "no_such_module"))
    with pytest.raises(NoEnvironment) as caught:
        make(options)
    assert caught.value.args[0] == f"no network; and {sys.executable} lacks no_such_module"
    assert "pip download --dest wheels no_such_module" in caught.value.args[1]


def test_settings_of_the_shell_do_not_reach_the_steps(options, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "ascend")
    monkeypatch.setenv("PYTHONPATH", "/of/the/vendor")
    variables = make(options).variables
    assert "HAL_ATTN_SIMULATE" not in variables
    assert variables["PYTHONPATH"] == "/of/the/vendor"


def test_the_vendor_s_script_sets_its_variables_unless_they_are_set(options, tmp_path, monkeypatch):
    script = tmp_path / "set_env.sh"
    script.write_text("echo noise\nexport ASCEND_HOME_PATH=/opt/cann LINES_OF='one\ntwo'\n")
    ascend = replace(options("ascend").platform, set_env=str(script))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    found = variables_of(ascend, simulated=False)
    assert (found["ASCEND_HOME_PATH"], found["LINES_OF"]) == ("/opt/cann", "one\ntwo")
    assert "ASCEND_HOME_PATH" not in variables_of(ascend, simulated=True)
    monkeypatch.setenv("ASCEND_HOME_PATH", "/mine")
    assert variables_of(ascend, simulated=False)["ASCEND_HOME_PATH"] == "/mine"


def test_every_package_that_is_required_is_asked_for(options):
    assert set(overlay._required(PROJECT)) >= {"torch", "rich", "typer", "platformdirs"}
    assert make(options).lacking(*overlay._required(PROJECT)) == []
