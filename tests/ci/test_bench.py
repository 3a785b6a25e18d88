"""The figures: kept by kind of machine, compared, and a slowdown named."""

import json
from pathlib import Path

import pytest
from runner import bench, process
from runner.environment import Environment
from runner.result import Status

KIND = "cuda-nvidia-h200"


def figures(ok=True, **times):
    rows = [{"key": key, "ours": True, "us": time} for key, time in times.items()]
    return {"ok": ok, "measure": "us", "rows": [*rows, {"key": "peer", "ours": False, "us": 1.0}]}


@pytest.fixture
def measure(options, tmp_path, monkeypatch):
    """Runs the step over a `hal-attn bench` that measures what it is told to; gives the result and the commands."""
    monkeypatch.setattr(bench, "machine_kind", lambda _: KIND)

    def start(found, status=0, **others):
        commands = []

        def run(command, log, **_):
            commands.append(command)
            if found is not None:
                Path(command[command.index("--json") + 1]).write_text(json.dumps(found))
            return process.Completed(status, 1.5, "a table\nError: some reason\n")

        monkeypatch.setattr(process, "run", run)
        given = options("cuda", **{"figures": tmp_path / "figures", **others})
        return bench.check(given, Environment(Path("python"), {})), commands

    return start


def kept(tmp_path, kind="kernels"):
    return json.loads((tmp_path / "figures" / KIND / f"{kind}.json").read_text())


def test_the_first_figures_are_kept_and_compared_with_nothing(measure, tmp_path):
    result, commands = measure(figures(dense=100.0))
    assert result.status is Status.PASSED
    assert result.summary == f"first figures of {KIND}: kernels, dispatch, packed"
    assert result.seconds == 4.5
    assert [command[4] for command in commands] == ["kernels", "dispatch", "packed"]
    assert all("--compare" not in command and "--quick" not in command for command in commands)
    assert kept(tmp_path) == figures(dense=100.0)


def test_later_ones_are_compared_and_the_kept_ones_stay(measure, tmp_path):
    measure(figures(dense=100.0))
    result, commands = measure(figures(dense=120.0))
    assert result.status is Status.PASSED
    assert result.summary == f"kernels, dispatch, packed compared with the figures of {KIND}"
    for command in commands:
        assert command[command.index("--compare") + 1] == str(tmp_path / "figures" / KIND / f"{command[4]}.json")
        assert command[command.index("--slower") + 1] == "1.25"
    assert kept(tmp_path) == figures(dense=100.0)


def test_a_slowdown_is_named_and_fails_only_where_that_is_asked_for(measure):
    measure(figures(dense=100.0, long=10.0, gone=5.0))
    slow = figures(dense=126.0, long=12.0, gone=None)
    result, _ = measure(slow, status=1)
    assert result.status is Status.PASSED
    assert result.summary.startswith(
        "SLOWER than 1.25x in 6 of the rows: kernels dense 1.26x; kernels gone no longer runs"
    )
    result, _ = measure(slow, status=1, fail_on_slowdown=True)
    assert result.status is Status.FAILED
    assert "--keep-figures" in result.remedy
    result, _ = measure(slow, status=1, slowdown=1.3)
    assert result.summary.startswith("SLOWER than 1.3x in 3 of the rows: kernels gone no longer runs; dispatch gone")


def test_new_figures_take_the_place_of_the_kept_ones_where_that_is_asked_for(measure, tmp_path):
    measure(figures(dense=100.0))
    result, _ = measure(figures(dense=90.0), keep_figures=True)
    assert result.summary.endswith("new figures kept")
    assert kept(tmp_path) == figures(dense=90.0)


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        (None, 2, "kernels: no figures, exit status 2, Error: some reason"),
        (figures(ok=False, dense=1.0), 1, "kernels: exit status 1, Error: some reason"),
        (figures(dense=1.0), 1, "kernels: exit status 1"),  # Nothing to be slower than.
        (figures(dense=1.0), None, "kernels: stopped after 0 minutes, its time limit"),
    ],
)
def test_a_measurement_that_fails_fails_the_step_and_is_not_kept(found, status, said, measure, tmp_path):
    result, _ = measure(found, status=status)
    assert result.status is Status.FAILED
    assert said in result.summary
    assert not (tmp_path / "figures").exists()


def test_a_simulation_is_not_measured(measure):
    result, commands = measure(figures(dense=1.0), simulation="cuda")
    assert (result.status, commands) == (Status.NOT_RUN, [])
