"""The pinned environment: made once for what it is made of, by one run at a time, and never over somebody's folder."""

import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest
from runner import pinned
from runner.environment import NoEnvironment


@pytest.fixture
def makings(monkeypatch):
    """Environments made, as their pins; making one costs nothing here."""
    made = []

    def create(options, folder, pins):
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "pyvenv.cfg").touch()

    monkeypatch.setattr(pinned, "_create", create)
    monkeypatch.setattr(pinned, "_install", lambda options, python, pins: made.append(pins))
    return made


def test_it_is_made_anew_only_when_its_pins_change(makings, options):
    first = pinned.make(options("cpu"))
    assert pinned.make(options("cpu")) == first
    assert len(makings) == 1
    pinned.make(options("cpu", overrides=("torch==2.9.1",)))
    assert [pins["torch"] for pins in makings] == ["2.13.0", "2.9.1"]


def test_a_simulation_runs_in_the_cpu_s(makings, options, tmp_path):
    environment = pinned.make(options("rocm", simulation="rocm"))
    assert environment.python == tmp_path / "environments" / "cpu" / "bin" / "python"
    assert environment.variables["PATH"].startswith(f"{environment.python.parent}:")
    assert "amd-aiter" not in makings[0]


def test_one_that_failed_is_made_again(makings, options, monkeypatch):
    def fails(*_):
        raise NoEnvironment("pip failed", "read the log")

    with monkeypatch.context() as broken:
        broken.setattr(pinned, "_install", fails)
        with pytest.raises(NoEnvironment, match="pip failed"):
            pinned.make(options("cpu"))
    pinned.make(options("cpu"))
    assert len(makings) == 1


def test_one_that_was_cut_short_is_made_again(makings, options, tmp_path, monkeypatch):
    def cut_short(_, folder, pins):
        (folder / "lib").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(pinned, "_create", cut_short)
        with pytest.raises(KeyboardInterrupt):
            pinned.make(options("cpu"))
    pinned.make(options("cpu"))
    assert len(makings) == 1


def test_a_folder_of_somebody_else_is_left_alone(makings, options, tmp_path):
    theirs = tmp_path / "environments" / "cpu" / "thesis.txt"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    with pytest.raises(NoEnvironment, match="is not empty and not of ci/run"):
        pinned.make(options("cpu"))
    assert theirs.exists()
    assert makings == []


def test_two_runs_do_not_make_it_at_once(tmp_path):
    file, order = tmp_path / "cpu.lock", []

    def second():
        with pinned.locked(file):
            order.append("second")

    with pinned.locked(file):
        other = threading.Thread(target=second)
        other.start()
        other.join(0.2)
        order.append("first")
    other.join(10)
    assert order == ["first", "second"]


def test_an_interpreter_with_another_pytorch_than_the_pinned_one_is_refused_where_the_index_has_none(options):
    given = options("rocm", python=sys.executable, overrides=("torch==1.2.3",))
    torch = metadata.version("torch")
    with pytest.raises(NoEnvironment) as caught:
        pinned.make(given)
    assert f"has PyTorch {torch}, and the pinned release for rocm is 1.2.3" in caught.value.args[0]
    assert "--override torch==VERSION" in caught.value.args[1]


def test_what_pip_could_not_install_is_named(options, monkeypatch):
    options = options("ascend", timeout_minutes=1.0)
    fails = Path("/bin/false")
    with pytest.raises(
        NoEnvironment, match=r"pip could not install torch by constraints-ascend.txt: exit status 1"
    ) as error:
        pinned._install(options, fails, {"torch": "2.13.0"})
    assert "environment.log" in error.value.args[1]
    assert (options.out / "constraints.txt").read_text() == "torch==2.13.0\n"
