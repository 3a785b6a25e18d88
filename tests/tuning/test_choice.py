"""Measured choices as a caller meets them: when they are made, what is chosen, and what explain says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

from hal_attn import attention, explain, select_backend, use_backend, varlen_attention
from hal_attn.tuning import choice, measuring
from tests.fakes import BatchedFake, claims, fresh, on_the_cpu  # noqa: F401
from tests.support import dense, packed


class Clock:
    """A clock that a `TimedFake` moves, so that a measurement is exact."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class TimedFake(BatchedFake):
    """A backend that takes `seconds` of that clock; `factor` makes its result wrong."""

    def __init__(self, name, clock, seconds, factor=1.0):
        super().__init__(name, claims())
        self.clock, self.seconds, self.factor = clock, seconds, factor

    def forward(self, query, key, value, **options):
        self.clock.now += self.seconds
        return super().forward(query, key, value, **options) * self.factor


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """HAL_ATTN_AUTOTUNE=on, and HAL_ATTN_CACHE_DIR in tmp_path."""
    clock = Clock()
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    return clock


@pytest.fixture
def bench(monkeypatch, clock):
    """Two backends, the second twice as fast, on a platform that prefers the first."""
    pair = TimedFake("slow", clock, 0.2), TimedFake("fast", clock, 0.1)
    on_the_cpu(monkeypatch, *pair)
    return pair


def again(monkeypatch, bench):
    """The same backends as a new process sees them: nothing remembered, nothing called."""
    on_the_cpu(monkeypatch, *bench)
    for backend in bench:
        backend.calls.clear()


def counts(bench):
    return [len(backend.calls) for backend in bench]


def measured_then(bench, **calls):
    """How often each was called for one measurement, and besides."""
    trials = min(counts(bench))
    assert trials > 2
    assert counts(bench) == [trials + calls.get(backend.name, 0) for backend in bench]


def kept(tmp_path):
    (file,) = (tmp_path / "cache").glob("*.json")
    return json.loads(file.read_text())["classes"]


@pytest.mark.parametrize("value", [None, "", "off"])
def test_off_measures_nothing(value, bench, monkeypatch, tmp_path):
    monkeypatch.delenv("HAL_ATTN_AUTOTUNE")
    if value is not None:
        monkeypatch.setenv("HAL_ATTN_AUTOTUNE", value)
    attention(*dense())
    assert counts(bench) == [1, 0]
    assert not (tmp_path / "cache").exists()


def test_on_measures_once_and_keeps_it(bench, tmp_path):
    attention(*dense())
    measured_then(bench, fast=1)
    attention(*dense())
    measured_then(bench, fast=2)
    (record,) = kept(tmp_path).values()
    assert record["milliseconds"] == pytest.approx({"slow": 200.0, "fast": 100.0})


def test_explain_shows_times_and_where_they_come_from(bench, tmp_path):
    attention(*dense())
    selection = explain(*dense())
    assert (selection.chosen.name, selection.source) == ("fast", "measurement")
    assert [name for name, _ in selection.measured] == ["fast", "slow"]
    assert dict(selection.measured) == pytest.approx({"fast": 100.0, "slow": 200.0})
    (file,) = (tmp_path / "cache").glob("*.json")
    assert selection.measurement.origin == str(file)
    (record,) = kept(tmp_path).values()
    text = str(selection)
    assert f"measured {record['when']}, {record['rounds']} rounds (kept in {file})" in text
    assert "slow  takes it, 200 ms" in text
    assert "fast  chosen, 100 ms" in text


@pytest.mark.parametrize("value", ["on", "cached"])
def test_what_was_kept_is_used_again(value, bench, monkeypatch):
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


def test_explain_measures_nothing(bench, tmp_path):
    assert select_backend(*dense()).name == "slow"
    assert explain(*dense()).measured == ()
    assert counts(bench) == [0, 0]
    assert not (tmp_path / "cache").exists()


def test_each_shape_class_is_measured_once(bench, tmp_path):
    attention(*dense(2, 33))
    attention(*dense(2, 34))
    measured_then(bench, fast=2)
    attention(*dense(2, 40))
    attention(*dense(2, 33), causal=True)
    query, key, value, sequences = packed([3, 2])
    varlen_attention(query, key, value, sequences=sequences)
    assert len(kept(tmp_path)) == 4
    assert select_backend(query, key, value, sequences=sequences).name == "fast"


def test_named_backends_are_left_as_they_are(bench, monkeypatch):
    attention(*dense(), backend=("slow", "fast"))
    with use_backend("slow"):
        attention(*dense())
    monkeypatch.setenv("HAL_ATTN_BACKEND", "slow")
    attention(*dense())
    assert counts(bench) == [3, 0]


def test_dropout_draws_no_random_numbers_for_a_measurement(bench):
    attention(*dense(), dropout_p=0.5)
    assert counts(bench) == [1, 0]


def test_only_backends_that_take_the_call_are_measured(bench, monkeypatch):
    _slow, fast = bench
    fast.capabilities = claims(softcap=False)
    attention(*dense(), softcap=1.0)
    assert counts(bench) == [1, 0]
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "slow")
    attention(*dense())
    assert counts(bench) == [1, 1]


def test_a_measured_backend_that_is_disabled_now_is_not_chosen(bench, monkeypatch):
    attention(*dense())
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "fast")
    assert select_backend(*dense()).name == "slow"


def test_a_wrong_backend_is_never_chosen_however_fast(monkeypatch, clock):
    pair = TimedFake("wrong", clock, 0.01, factor=1.5), TimedFake("right", clock, 0.1)
    on_the_cpu(monkeypatch, *pair)
    attention(*dense())
    selection = explain(*dense())
    assert (selection.chosen.name, selection.source) == ("right", "measurement")
    assert [name for name, _ in selection.measured] == ["right"]
    assert "wrong  takes it, left out: its result differs from that of right: output is" in str(selection)
    again(monkeypatch, pair)
    attention(*dense())
    assert counts(pair) == [0, 1]


def test_one_that_breaks_is_measured_no_more(monkeypatch, clock):
    class Breaking(BatchedFake):
        def forward(self, query, key, value, **options):
            self.calls.append(options)
            raise RuntimeError("no kernel image")

    pair = Breaking("breaking"), TimedFake("sound", clock, 0.1)
    on_the_cpu(monkeypatch, *pair)
    assert attention(*dense()).shape == dense()[0].shape
    again(monkeypatch, pair)
    attention(*dense())
    assert counts(pair) == [0, 1]
    assert dict(explain(*dense()).measurement.left_out) == {"breaking": "it failed: RuntimeError: no kernel image"}


def test_too_little_memory_is_kept_for_nobody(monkeypatch, clock, tmp_path):
    class Hungry(BatchedFake):
        def forward(self, query, key, value, **options):
            raise torch.OutOfMemoryError("too little")

    on_the_cpu(monkeypatch, Hungry("hungry"), TimedFake("sound", clock, 0.1))
    assert attention(*dense()).shape == dense()[0].shape
    assert list((tmp_path / "cache").glob("*.json")) == []


def test_gradients_are_what_they_are_without(bench, monkeypatch):
    query, key, value = (tensor.requires_grad_() for tensor in dense())
    attention(query, key, value).sum().backward()
    measured = query.grad.clone()
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "off")
    query.grad = None
    attention(query, key, value).sum().backward()
    torch.testing.assert_close(query.grad, measured, rtol=0, atol=0)


def test_a_backend_that_was_not_measured_is(bench, monkeypatch, clock, tmp_path):
    attention(*dense())
    (name,) = kept(tmp_path)
    more = (*bench, TimedFake("faster", clock, 0.05))
    again(monkeypatch, more)
    attention(*dense())
    assert min(counts(more)) > 0
    assert set(kept(tmp_path)[name]["milliseconds"]) == {"slow", "fast", "faster"}
    assert select_backend(*dense()).name == "faster"


def test_what_is_known_counts_where_nothing_may_be_measured(bench, monkeypatch, clock):
    attention(*dense())
    again(monkeypatch, (TimedFake("new", clock, 0.01), *bench))
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "cached")
    assert select_backend(*dense()).name == "fast"


def test_a_folder_that_cannot_be_written_only_costs_the_keeping(bench, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    attention(*dense())
    measured_then(bench, fast=1)
    assert "could not be kept" in caplog.text


def test_a_process_that_measures_too_long_is_not_waited_for(bench, monkeypatch, caplog):
    """Its kept file is locked by somebody else."""
    monkeypatch.setattr(choice, "LOCK_SECONDS", 0.05)
    original = choice.Kept.find
    held = []

    def find(self, name):
        if not held:
            held.append(self.locked(5))
            held[0].__enter__()
        return original(self, name)

    monkeypatch.setattr(choice.Kept, "find", find)
    try:
        attention(*dense())
    finally:
        held[0].__exit__(None, None, None)
    assert counts(bench) == [1, 0]
    assert "still measuring" in caplog.text


def test_what_another_process_measured_meanwhile_is_taken(bench, monkeypatch):
    attention(*dense())
    again(monkeypatch, bench)
    original = choice.Kept.find
    asked = []

    def find(self, name):
        asked.append(name)
        return None if len(asked) == 1 else original(self, name)

    monkeypatch.setattr(choice.Kept, "find", find)
    attention(*dense())
    assert counts(bench) == [0, 1]


def test_devices_that_cannot_be_listed_do_not_stop_a_measurement(bench, monkeypatch):
    platform = on_the_cpu(monkeypatch, *bench)
    monkeypatch.setattr(platform, "devices", _gone)
    assert attention(*dense()).shape == dense()[0].shape


def _gone():
    raise OSError("the driver is gone")


def test_a_measured_choice_is_no_fallback_to_warn_of(bench, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_FALLBACK", "warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*dense())


def test_calls_without_keys_are_not_measured(bench):
    query, key, value = dense(2, 5, 0)
    attention(query, key, value)
    assert counts(bench) == [0, 0]


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
