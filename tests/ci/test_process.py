"""Commands: their output in the log, their end in words, and a time limit that leaves nothing running."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runner import process

from tests.ci.waiting import gone, within


def run(log, code, minutes=1.0):
    command = [sys.executable, "-c", code]
    return process.run(command, log, variables=os.environ, folder=Path("/"), timeout_minutes=minutes)


def test_output_goes_to_the_end_of_the_log(tmp_path):
    log = tmp_path / "logs" / "a.log"
    assert run(log, "print('one')").ok
    done = run(log, "import sys; print('two', flush=True); print('three', file=sys.stderr)")
    assert done.ok
    assert done.tail.split() == ["two", "three"]
    assert log.read_text().count("\n$ ") == 1
    assert "one" in log.read_text()


@pytest.mark.parametrize(
    ("code", "ending"),
    [("raise SystemExit(3)", "exit status 3"), ("import os; os.kill(os.getpid(), 11)", "ended by signal SIGSEGV")],
)
def test_how_it_ended_is_said(code, ending, tmp_path):
    assert run(tmp_path / "a.log", code).ending == ending


@pytest.mark.parametrize(
    ("output", "verdict"),
    [("ERROR: no such thing\nnote: see pip", "ERROR: no such thing"), ("one\ntwo\n\n", "two"), ("", "no output")],
)
def test_the_verdict_is_the_error_or_the_last_word(output, verdict):
    assert process.Completed(1, 0.0, output).verdict == verdict


def test_a_command_that_is_not_there_is_no_traceback(tmp_path):
    done = process.run(["/no/such/command"], tmp_path / "a.log", variables={}, folder=tmp_path, timeout_minutes=1)
    assert (done.returncode, done.ok) == (127, False)
    assert "/no/such/command" in done.verdict


def test_at_the_time_limit_its_children_end_too(tmp_path, monkeypatch):
    child = tmp_path / "child"
    wait = subprocess.Popen.wait

    def once_the_child_is_there(self, timeout=None):
        """The limit begins then: a slow machine needs long to start two interpreters."""
        if timeout is not None:
            assert within(120, lambda: child.exists() and child.read_text()), "the child did not start"
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", once_the_child_is_there)
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(p.pid))\n"
        "time.sleep(600)"
    )
    done = run(tmp_path / "a.log", code, minutes=0.01)
    assert done.returncode is None
    assert "its time limit" in done.ending
    assert within(60, lambda: gone(int(child.read_text())))


def test_one_that_will_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "PATIENCE", 0.2)
    wait = subprocess.Popen.wait
    log = tmp_path / "a.log"

    def once_it_ignores_the_signal(self, timeout=None):
        assert within(120, lambda: "deaf" in log.read_text().splitlines()), "it did not start"
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", once_it_ignores_the_signal)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    assert run(log, code, minutes=0.001).returncode is None


def test_a_child_has_its_time_to_end_although_its_parent_ended_at_once(tmp_path, monkeypatch):
    """As torchrun, which ends its ranks first: they are in sessions of their own."""
    child, tidied = tmp_path / "child", tmp_path / "tidied"
    wait = subprocess.Popen.wait

    def once_the_child_is_there(self, timeout=None):
        assert within(120, lambda: child.exists() and child.read_text()), "the child did not start"
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", once_the_child_is_there)
    inner = (
        "import os, signal, time\n"
        "def tidy(*_):\n"
        "    time.sleep(0.5)\n"
        f"    open({str(tidied)!r}, 'w').close()\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, tidy)\n"
        f"open({str(child)!r}, 'w').write('there')\n"
        "time.sleep(600)"
    )
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {inner!r}])\ntime.sleep(600)"
    assert run(tmp_path / "a.log", code, minutes=0.01).returncode is None
    assert tidied.exists()
