"""A run that is ended from outside: what it started ends with it, and what it has is left."""

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.ci.waiting import gone, within

ROOT = Path(__file__).parents[2]
WAITS = """
import subprocess, sys, time

def test_waits():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open({pids!r}, "w") as file:
        print(child.pid, file=file)
    time.sleep(600)
"""


@pytest.fixture
def started(tmp_path):
    """`ci/run cpu` in the midst of its step `unit`, and the process that a test of it started."""
    pids, test = tmp_path / "pids", tmp_path / "test_waits.py"
    test.write_text(WAITS.format(pids=str(pids)))
    arguments = ["cpu", "--no-install", "--steps", "device,unit,conformance", "--workers", "1", "--tests", str(test)]
    where = ["--out", str(tmp_path / "out"), "--environments", str(tmp_path / "environments")]
    summary = {"GITHUB_STEP_SUMMARY": str(tmp_path / "github.md"), "PYTHON": sys.executable}
    run = subprocess.Popen(
        [ROOT / "ci" / "run", *arguments, *where], env={**os.environ, **summary}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert within(240, lambda: pids.exists() and pids.read_text().endswith("\n")), "the test did not start"
        yield run, int(pids.read_text())
    finally:
        run.kill()
        run.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_leaves_what_it_has_and_no_process(started, tmp_path, number):
    run, child = started
    before = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {step["step"]: step["status"] for step in before["steps"]} == {
        **dict.fromkeys(("device", "environment", "detection"), "passed"),
        **dict.fromkeys(("unit", "conformance"), "not run"),
    }
    assert before["ok"] is False
    run.send_signal(number)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert within(30, lambda: gone(child))
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    steps = {step["step"]: step for step in content["steps"]}
    assert content["ok"] is False
    assert [step["status"] for step in steps.values()] == ["passed", "passed", "passed", "FAILED", "not run"]
    assert steps["unit"]["summary"] == f"ended by {number.name}, with all that it had started"
    assert steps["unit"]["seconds"] > 0
    assert steps["conformance"]["summary"] == "the run was ended before it"
    assert "FAILED: unit; not run: conformance" in said
    summary = (tmp_path / "github.md").read_text()
    assert summary == (tmp_path / "out" / "summary.md").read_text()
    assert summary.count("## ci/run cpu") == 1
    suite = ElementTree.parse(tmp_path / "out" / "steps.junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "1", "1")
    assert "ended by" in (tmp_path / "out" / "index.html").read_text()
