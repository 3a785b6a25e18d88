"""`ci/run` as a runner calls it: a missing device fails, later steps still run, and the report is there."""

import json
import os
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from runner import pipeline
from runner.platforms import PLATFORMS
from runner.result import Result, Status

from tests.ci.conftest import NO_NETWORK

VENDORS = ("ascend", "cuda", "rocm")
# What detection says on a machine of another vendor; no machine has the devices of both.
ABSENT = {"ascend": "torch-npu is not installed", "rocm": "is built without ROCm"}
REPORTS = ("report.json", "steps.junit.xml", "summary.md", "index.html")


def has_device(platform):
    return all(any(Path("/").glob(pattern)) for pattern in PLATFORMS[platform].device_files)


@pytest.mark.parametrize("platform", VENDORS)
def test_a_missing_device_fails_with_reason_and_remedy_and_never_skips(platform, ci_run, report, tmp_path):
    done = ci_run(platform, "--steps", "device")
    step = report()["device"]
    if has_device(platform):
        assert (done.returncode, step["status"]) == (0, "passed")
        return
    assert done.returncode == 1
    assert step["status"] == "FAILED"
    assert f"no device of {platform} here" in step["summary"]
    assert step["remedy"] == PLATFORMS[platform].remedy
    assert step["remedy"] in done.stdout
    suite = ElementTree.parse(tmp_path / "out" / "steps.junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("1", "1", "0")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name one PLATFORM, or --simulate"),
        (("cpu", "--simulate", "rocm"), "it is one of them"),
        (("tpu",), "platform 'tpu' is not known here; known are cpu, cuda, rocm, ascend"),
        (("--simulate", "cpu"), "known are ascend, cuda, rocm"),
        (("cpu", "--steps", "unit,later"), "--steps later; steps are device, environment"),
        (("cpu", "--steps", ""), "--steps is empty"),
        (("cpu", "--wheels", "nowhere"), "--wheels nowhere is no folder"),
        (("cpu", "--override", "torch>=2.5"), "got 'torch>=2.5', need NAME==VERSION"),
        (("cpu", "--slowdown", "0.9"), "--slowdown 0.9; it must be above 1"),
        (("cpu", "--workers", "0"), "--workers 0; it must be above 0"),
        (("--collect", "nowhere"), "no report.json below nowhere"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_made(arguments, said, ci_run, tmp_path):
    done = ci_run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


# Python 3.8 reads nothing that is newer than it; here, nothing of the runner.
OLD = """#!{python}
import runpy, sys

class Newer:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("runner"):
            raise SyntaxError(name)

sys.meta_path.insert(0, Newer())
sys.version_info = (3, 8, 10, "final", 0)
sys.executable = sys.argv[0]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_interpreter_that_is_too_old_is_named_in_one_line(ci_run, tmp_path):
    old = tmp_path / "python3.8"
    old.write_text(OLD.format(python=sys.executable))
    old.chmod(0o755)
    done = ci_run("cpu", PYTHON=str(old))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ci/run: {old} is Python 3.8.10; it needs 3.11 or newer")
    assert "PYTHON=/path/to/python3.11 ci/run" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [old]


def test_a_step_that_fails_stops_none_after_it(ci_run, report, tmp_path):
    absent = next(platform for platform in ABSENT if not has_device(platform))
    test = tmp_path / "test_ok.py"
    test.write_text("def test_ok():\n    pass\n")
    summary = tmp_path / "github.md"
    steps = ("--steps", "device,detection,unit,hardware", "--no-install", "--workers", "1")
    done = ci_run(absent, *steps, "--tests", str(test), GITHUB_STEP_SUMMARY=str(summary))
    found = {name: step["status"] for name, step in report().items()}
    assert done.returncode == 1
    failed = dict.fromkeys(("device", "detection", "hardware"), "FAILED")
    assert found == {**failed, "environment": "passed", "unit": "passed"}
    assert report()["detection"]["summary"].endswith(ABSENT[absent])
    assert report()["unit"]["counts"] == {"tests": 1, "failures": 0, "errors": 0, "skipped": 0}
    assert "FAILED: device, detection, hardware" in done.stdout
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert {*REPORTS, "unit.junit.xml", "hardware.junit.xml", "doctor.json"} <= left
    assert summary.read_text() == (tmp_path / "out" / "summary.md").read_text()
    assert "| unit | passed |" in summary.read_text()


def test_a_failing_test_fails_its_step(ci_run, report, tmp_path):
    test = tmp_path / "test_wrong.py"
    test.write_text("def test_wrong():\n    assert False, 'wrong on purpose'\n")
    done = ci_run("cpu", "--steps", "unit", "--no-install", "--workers", "1", "--tests", str(test))
    assert done.returncode == 1
    assert report()["unit"]["counts"]["failures"] == 1
    assert "exit status 1" in report()["unit"]["summary"]
    assert "wrong on purpose" in (tmp_path / "out" / "logs" / "unit.log").read_text()


def test_without_a_network_the_interpreter_is_used_as_it_is_and_that_is_said(ci_run, report, tmp_path):
    done = ci_run("cpu", "--steps", "environment,detection", **NO_NETWORK)
    assert done.returncode == 0, done.stdout + done.stderr
    said = report()["environment"]["summary"]
    assert "NOT INSTALLED from the constraints: pip cannot fetch filelock==" in said
    facts = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert facts["why_not_pinned"].startswith("pip cannot fetch filelock==")
    assert facts["installed"]["hal-attn"]
    assert report()["detection"]["status"] == "passed"


def test_a_simulation_says_that_it_is_one(ci_run, report):
    done = ci_run("--simulate", "ascend:310P", "--steps", "device,detection,hardware,bench", "--no-install")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: step["status"] for name, step in report().items()}
    simulated, not_run = (
        dict.fromkeys(("device", "detection"), "SIMULATED"),
        dict.fromkeys(("hardware", "bench"), "not run"),
    )
    assert found == {**simulated, "environment": "passed", **not_run}
    assert "Ascend310P3" in report()["detection"]["summary"]
    assert "SIMULATED, no device of ascend was used; not run: hardware, bench" in done.stdout


def test_a_generation_that_does_not_exist_fails_and_is_named(ci_run, report):
    done = ci_run("--simulate", "rocm:gfx000", "--steps", "detection", "--no-install")
    assert done.returncode == 1
    assert "gfx000" in report()["detection"]["summary"]


def test_an_interpreter_without_pytorch_fails_every_step_that_needs_it(ci_run, report, tmp_path):
    bare = tmp_path / "bare"
    # Without `site`, and so without what is installed.
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    done = ci_run("cpu", "--no-install", "--python", str(bare), "--steps", "device,environment,detection,unit")
    assert done.returncode == 1
    assert {name for name, step in report().items() if step["status"] == "FAILED"} == {
        "environment",
        "detection",
        "unit",
    }
    assert "no interpreter here has PyTorch" in report()["environment"]["summary"]
    assert report()["unit"]["summary"] == "no environment to run it in"


def test_an_old_report_is_removed_and_kept_figures_stay(ci_run, tmp_path):
    figures = tmp_path / "out" / "figures" / "cpu-some" / "kernels.json"
    figures.parent.mkdir(parents=True)
    figures.write_text("{}")
    old = tmp_path / "out" / "conformance.json"
    old.write_text("{}")
    assert ci_run("cpu", "--steps", "device").returncode == 0
    assert figures.exists()
    assert not old.exists()


def test_it_says_so_where_there_is_no_python(tmp_path):
    run = Path(shutil.copy(Path(__file__).parents[2] / "ci" / "run", tmp_path))
    status = os.spawnve(os.P_WAIT, str(run), [str(run), "cpu"], {"PATH": "/usr/bin:/bin", "PYTHON": "no-such-python"})
    assert status == 2


def test_a_step_that_breaks_has_failed_and_the_others_run(options, monkeypatch):
    def breaks(*_):
        raise KeyError("on purpose")

    def fine(*_):
        return Result("hardware", Status.PASSED, "fine")

    made = Result("environment", Status.PASSED, "made")
    monkeypatch.setattr(pipeline, "prepare", lambda _: (object(), made))
    monkeypatch.setitem(pipeline.IN_ENVIRONMENT, "unit", breaks)
    monkeypatch.setitem(pipeline.IN_ENVIRONMENT, "hardware", fine)
    told = []
    results = pipeline.run(options("cpu", steps=("unit", "hardware")), told.append)
    assert told == results
    assert [result.status for result in results] == [Status.PASSED, Status.FAILED, Status.PASSED]
    assert results[1].summary == "ci/run itself broke: KeyError: 'on purpose'"


@pytest.mark.parametrize(
    ("asked", "ran"),
    [
        (("unit",), ["unit"]),
        (("bench",), ["detection", "bench"]),
        (("unit", "conformance"), ["detection", "unit", "conformance"]),
        (("detection", "bench"), ["detection", "bench"]),
    ],
)
def test_a_step_that_is_judged_by_what_was_detected_has_it_detected(options, monkeypatch, asked, ran):
    monkeypatch.setattr(pipeline, "prepare", lambda _: (object(), Result("environment", Status.PASSED, "made")))
    for step in pipeline.IN_ENVIRONMENT:
        monkeypatch.setitem(pipeline.IN_ENVIRONMENT, step, lambda *_, step=step: Result(step, Status.PASSED, "fine"))
    results = pipeline.run(options("cuda", steps=asked), lambda _: None)
    assert [result.step for result in results] == ["environment", *ran]
