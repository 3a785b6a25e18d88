"""Measured choices: when they are made, what file keeps them, and what happens to a file that is torn or foreign."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

from hal_attn import attention, explain, select_backend, use_backend, varlen_attention
from hal_attn import tuning as tuning_module
from tests.fakes import BatchedFake, claims, fresh, on_the_cpu  # noqa: F401
from tests.support import dense, packed

RUNS = 1 + tuning_module.REPEATS


class Clock:
    """A clock that a `TimedFake` moves, so that a measurement is exact."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class TimedFake(BatchedFake):
    """A backend that takes `seconds` of that clock."""

    def __init__(self, name, clock, seconds, capabilities=None):
        super().__init__(name, capabilities or claims())
        self.clock = clock
        self.seconds = seconds

    def forward(self, query, key, value, **options):
        self.clock.now += self.seconds
        return super().forward(query, key, value, **options)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Two backends, the second twice as fast, on a platform that prefers the first; HAL_ATTN_CACHE_DIR is tmp_path."""
    clock = Clock()
    monkeypatch.setattr(tuning_module, "time", clock)
    pair = TimedFake("slow", clock, 0.2), TimedFake("fast", clock, 0.1)
    on_the_cpu(monkeypatch, *pair)
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    return pair


def again(monkeypatch, bench):
    """The same backends as a new process sees them: nothing remembered, nothing called."""
    on_the_cpu(monkeypatch, *bench)
    for backend in bench:
        backend.calls.clear()


def counts(bench):
    return [len(backend.calls) for backend in bench]


def kept(tmp_path):
    (file,) = (tmp_path / "cache").glob("*.json")
    return file


@pytest.mark.parametrize("value", [None, "", "off"])
def test_off_measures_nothing(value, bench, monkeypatch, tmp_path):
    if value is not None:
        monkeypatch.setenv("HAL_ATTN_AUTOTUNE", value)
    attention(*dense())
    assert counts(bench) == [1, 0]
    assert not (tmp_path / "cache").exists()


def test_on_measures_once_and_keeps_it(bench, monkeypatch, tmp_path):
    attention(*dense())
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense())
    assert counts(bench) == [1 + RUNS, RUNS + 1]
    attention(*dense())
    assert counts(bench) == [1 + RUNS, RUNS + 2]
    (times,) = json.loads(kept(tmp_path).read_text()).values()
    assert times == pytest.approx({"slow": 0.2, "fast": 0.1})
    selection = explain(*dense())
    assert (selection.chosen.name, selection.source) == ("fast", "measurement")
    assert "measured: slow 200.000 ms, fast 100.000 ms" in str(selection)


@pytest.mark.parametrize("value", ["on", "cached"])
def test_what_was_kept_is_used_again(value, bench, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense())
    again(monkeypatch, bench)
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", value)
    attention(*dense())
    assert counts(bench) == [0, 1]


def test_cached_measures_nothing(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "cached")
    attention(*dense())
    assert counts(bench) == [1, 0]
    assert not (tmp_path / "cache").exists()


def test_explain_measures_nothing(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    assert select_backend(*dense()).name == "slow"
    assert counts(bench) == [0, 0]
    assert not (tmp_path / "cache").exists()


def test_each_shape_class_is_measured_once(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense(2, 5))
    attention(*dense(2, 8))
    assert counts(bench) == [RUNS, RUNS + 2]
    attention(*dense(2, 9))
    attention(*dense(2, 5), causal=True)
    query, key, value, sequences = packed([3, 2])
    varlen_attention(query, key, value, sequences=sequences)
    assert len(json.loads(kept(tmp_path).read_text())) == 4
    assert select_backend(query, key, value, sequences=sequences).name == "fast"


def test_packed_calls_measure_the_call_itself(bench, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    query, key, value, sequences = packed([3, 2])
    varlen_attention(query, key, value, sequences=sequences)
    slow, fast = counts(bench)
    assert slow % RUNS == 0
    assert fast * RUNS == slow * (RUNS + 1)


def test_named_backends_are_left_as_they_are(bench, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense(), backend=("slow", "fast"))
    with use_backend("slow"):
        attention(*dense())
    monkeypatch.setenv("HAL_ATTN_BACKEND", "slow")
    attention(*dense())
    assert counts(bench) == [3, 0]


def test_dropout_draws_no_random_numbers_for_a_measurement(bench, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense(), dropout_p=0.5)
    assert counts(bench) == [1, 0]


def test_only_backends_that_take_the_call_are_measured(bench, monkeypatch):
    _slow, fast = bench
    fast.capabilities = claims(softcap=False)
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense(), softcap=1.0)
    assert counts(bench) == [1, 0]
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "slow")
    attention(*dense())
    assert counts(bench) == [1, 1]


def test_a_measured_backend_that_is_disabled_now_is_not_chosen(bench, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense())
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "fast")
    assert select_backend(*dense()).name == "slow"


def test_a_measurement_leaves_gradients_alone(bench, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    query, key, value = (tensor.requires_grad_() for tensor in dense())
    attention(query, key, value).sum().backward()
    measured = query.grad.clone()
    query.grad = None
    attention(query, key, value).sum().backward()
    torch.testing.assert_close(query.grad, measured, rtol=0, atol=0)


FOREIGN = {
    "torn": '{"batched 2x8": {"slow": 0.',
    "empty": "",
    "a list": "[1, 2]",
    "a number": "3",
    "flat": '{"a": 1}',
    "text for seconds": '{"a": {"slow": "soon"}}',
    "nested": '{"a": {"slow": {"p50": 1}}}',
    "binary": b"\x80\x81\xff",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_torn_or_foreign_file_is_only_ignored(content, bench, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense())
    file = kept(tmp_path)
    right = file.read_text()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    again(monkeypatch, bench)
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "cached")
    attention(*dense())
    assert counts(bench) == [1, 0]
    assert "unreadable" in caplog.text
    assert str(file) in caplog.text
    again(monkeypatch, bench)
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense())
    assert counts(bench) == [RUNS, RUNS + 1]
    assert json.loads(file.read_text()).keys() == json.loads(right).keys()


@pytest.mark.parametrize("seconds", ["NaN", "-1.0", "0.0", "-Infinity"])
def test_times_that_cannot_be_are_measured_again(seconds, bench, monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense())
    (name,) = json.loads(kept(tmp_path).read_text())
    kept(tmp_path).write_text(f'{{"{name}": {{"slow": {seconds}, "fast": 0.1}}}}')
    again(monkeypatch, bench)
    assert select_backend(*dense()).name != "slow" or explain(*dense()).source != "measurement"


def test_a_backend_that_was_not_measured_is(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense())
    (name,) = json.loads(kept(tmp_path).read_text())
    kept(tmp_path).write_text(json.dumps({name: {"slow": 0.2, "of another build": 0.01}, "another class": {"slow": 1}}))
    again(monkeypatch, bench)
    attention(*dense())
    assert counts(bench) == [RUNS, RUNS + 1]
    content = json.loads(kept(tmp_path).read_text())
    assert content["another class"] == {"slow": 1}
    assert content[name] == pytest.approx({"slow": 0.2, "fast": 0.1})


def test_a_folder_that_cannot_be_written_only_costs_the_keeping(bench, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    attention(*dense())
    assert counts(bench) == [RUNS, RUNS + 1]
    assert "could not be kept" in caplog.text


class Breaking(BatchedFake):
    def forward(self, query, key, value, **options):
        raise RuntimeError("no kernel image")


def test_a_candidate_that_breaks_while_it_is_measured_loses(monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    on_the_cpu(monkeypatch, BatchedFake("sound"), Breaking("breaking"))
    assert attention(*dense()).shape == dense()[0].shape
    assert select_backend(*dense()).name == "sound"


def test_devices_that_cannot_be_listed_do_not_stop_a_measurement(bench, monkeypatch):
    platform = on_the_cpu(monkeypatch, *bench)
    monkeypatch.setattr(platform, "devices", _gone)
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    assert attention(*dense()).shape == dense()[0].shape


def _gone():
    raise OSError("the driver is gone")


def _write(file, name, count):
    from pathlib import Path

    for index in range(count):
        tuning_module._keep(Path(file), f"{name} {index}", {"slow": 0.2})


def test_two_processes_keep_all_that_both_measured(tmp_path):
    file = tmp_path / "cache" / "shared.json"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write, args=(str(file), name, 20)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert set(json.loads(file.read_text())) == {f"{name} {index}" for name in "ab" for index in range(20)}
    assert list(file.parent.glob("*.tmp")) == []


def test_another_process_uses_what_one_measured(tmp_path):
    code = (
        "import torch, hal_attn as h; t = torch.ones(1, 2, 1, 4); before = h.explain(t, t, t).source;"
        "h.attention(t, t, t); print(before, '->', h.explain(t, t, t).source)"
    )

    def run(autotune):
        added = {"HAL_ATTN_AUTOTUNE": autotune, "HAL_ATTN_CACHE_DIR": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **added}, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert run("on") == "the default order of cpu -> measurement"
    assert run("cached") == "measurement -> measurement"
    assert run("off") == "the default order of cpu -> the default order of cpu"
