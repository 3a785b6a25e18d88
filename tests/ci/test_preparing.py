"""The environment that was made has to start what the later steps start, or the step says what it lacks."""

import sys

import pytest
from runner import preparing
from runner.result import Status

from tests.ci.conftest import wheel


@pytest.fixture
def prepare(options, tmp_path):
    """Makes the environment over this interpreter, with one wheel laid over it; gives both results."""

    def make(name, code):
        wheel(tmp_path / "wheels", name, code=code)
        return preparing.prepare(options("cpu", install=False, python=sys.executable, wheels=tmp_path / "wheels"))

    return make


def test_an_environment_in_which_everything_starts_has_passed(prepare):
    environment, result = prepare("carried", "VALUE = 7")
    assert environment is not None
    assert result.status is Status.PASSED


@pytest.mark.parametrize(
    ("package", "starts"),
    [
        ("typer", "-m hal_attn.cli env --json"),
        ("pydantic", "-m hal_attn.cli env --json"),  # typer imports it when it reads an option, not before.
        ("hypothesis", "-c 'import filelock, hypothesis, jinja2, pytest'"),
    ],
)
def test_a_module_that_a_package_needs_and_that_is_not_there_is_named_with_its_remedy(prepare, package, starts):
    # As where a wheel was carried without what it requires.
    environment, result = prepare(package, "import no_such_module.part")
    assert environment is None
    assert (result.step, result.status) == ("environment", Status.FAILED)
    assert f"python {starts} does not start: the module no_such_module is missing in" in result.summary
    assert "pip download" in result.remedy
    assert "no_such_module" in result.remedy
    assert "--wheels wheels" in result.remedy


def test_what_starts_no_more_for_another_reason_is_said_with_its_log(prepare, tmp_path):
    environment, result = prepare("typer", "raise OSError('half a wheel')")
    assert environment is None
    assert "python -m hal_attn.cli env --json does not start: OSError: half a wheel" in result.summary
    assert result.remedy == f"read {tmp_path / 'out' / 'logs' / 'environment.log'}"


@pytest.fixture
def interpreter(tmp_path):
    """A file in the place of an interpreter, which does what these lines of shell say."""

    def make(lines):
        file = tmp_path / "python"
        file.write_text(f"#!/bin/sh\n{lines}\n")
        file.chmod(0o755)
        return str(file)

    return make


def test_an_interpreter_too_old_for_the_pinned_versions_is_named_with_both_ways_out(options, interpreter):
    # It says its version, and that a package was fetched.
    python = interpreter("echo 3 10 12")
    environment, result = preparing.prepare(options("cpu", python=python))
    assert environment is None
    assert result.summary == f"{python} is Python 3.10.12; the pinned versions need 3.11 or newer"
    assert "--python /path/to/python3.11" in result.remedy
    assert "--no-install" in result.remedy


@pytest.mark.parametrize("lines", ["exit 3", "echo hello", None], ids=["fails", "is no Python", "is not there"])
@pytest.mark.parametrize("install", [True, False])
def test_an_interpreter_that_does_not_run_is_named(options, interpreter, lines, install):
    python = "/no/such/python" if lines is None else interpreter(lines)
    environment, result = preparing.prepare(options("cpu", python=python, install=install))
    assert environment is None
    assert result.summary.startswith(f"{python} is no Python that runs: ")
    assert result.remedy == "name one with --python"
