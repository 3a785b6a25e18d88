"""Every environment variable: right, empty and wrong values, unknown names, and a change that counts at once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hal_attn_cpu.platform import CpuPlatform

from hal_attn import (
    ConfigurationError,
    InvalidAttentionInputError,
    PackedSequences,
    UnsupportedAttentionError,
    attention,
    backends,
    explain,
    platforms,
    select_backend,
    varlen_attention,
)
from hal_attn.settings import VARIABLES, Settings, read
from tests.fakes import BatchedFake, FakePlatform, claims, fresh, install, on_the_cpu  # noqa: F401
from tests.support import dense, packed

RIGHT = [
    ("HAL_ATTN_PLATFORM", "cpu", "platform", "cpu"),
    ("HAL_ATTN_PLATFORM", " my-vendor_2 ", "platform", "my-vendor_2"),
    ("HAL_ATTN_BACKEND", "cpu_math", "backend", ("cpu_math",)),
    ("HAL_ATTN_BACKEND", "a, b ,c", "backend", ("a", "b", "c")),
    ("HAL_ATTN_DISABLED_BACKENDS", "a,b", "disabled_backends", ("a", "b")),
    ("HAL_ATTN_FALLBACK", "warn", "fallback", "warn"),
    ("HAL_ATTN_FALLBACK", "ALLOW", "fallback", "allow"),
    ("HAL_ATTN_EMPTY_SEQUENCES", "compact", "empty_sequences", "compact"),
    ("HAL_ATTN_AUTOTUNE", "cached", "autotune", "cached"),
    ("HAL_ATTN_CACHE_DIR", "no/such/folder/yet", "cache_dir", Path("no/such/folder/yet")),
    ("HAL_ATTN_SIMULATE", "ascend", "simulate", "ascend"),
    ("HAL_ATTN_SIMULATE", "ascend:310P", "simulate", "ascend:310P"),
    ("HAL_ATTN_VALIDATE", "full", "validate", "full"),
    ("HAL_ATTN_LOG_LEVEL", "debug", "log_level", logging.DEBUG),
]
WRONG = [
    ("HAL_ATTN_PLATFORM", "cpu,cuda", "one name"),
    ("HAL_ATTN_BACKEND", "a,,b", "none of them empty"),
    ("HAL_ATTN_BACKEND", "a;b", "name"),
    ("HAL_ATTN_DISABLED_BACKENDS", ",", "none of them empty"),
    ("HAL_ATTN_FALLBACK", "yes", "error, warn, allow"),
    ("HAL_ATTN_EMPTY_SEQUENCES", "drop", "platform, reject, compact"),
    ("HAL_ATTN_AUTOTUNE", "1", "off, on, cached"),
    ("HAL_ATTN_CACHE_DIR", __file__, "a folder"),
    ("HAL_ATTN_CACHE_DIR", "~no-such-user-here/cache", "a folder"),
    ("HAL_ATTN_CACHE_DIR", "x" * 300, "a folder"),
    ("HAL_ATTN_SIMULATE", "ascend,rocm", "one name"),
    ("HAL_ATTN_SIMULATE", "ascend:", "after the colon"),
    ("HAL_ATTN_VALIDATE", "slow", "fast, full"),
    ("HAL_ATTN_LOG_LEVEL", "LOUD", "DEBUG, INFO, WARNING, ERROR, CRITICAL"),
]


@pytest.mark.parametrize(("name", "text", "field", "value"), RIGHT)
def test_right_values(name, text, field, value):
    assert getattr(read({name: text}), field) == value


@pytest.mark.parametrize(("name", "text", "allowed"), WRONG, ids=[f"{name}={text[:30]}" for name, text, _ in WRONG])
def test_a_wrong_value_lists_the_right_ones_at_each_call(name, text, allowed, monkeypatch):
    tensors = dense(1, 3)
    attention(*tensors)
    monkeypatch.setenv(name, text)
    for call in (attention, attention, explain, select_backend):
        with pytest.raises(ConfigurationError) as caught:
            call(*tensors)
        assert str(caught.value).startswith(f"{name}: got {text!r}; allowed: ")
        assert allowed in str(caught.value)
    monkeypatch.delenv(name)
    attention(*tensors)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_value_counts_as_not_set(variable, text, monkeypatch):
    assert read({variable.name: text}) == Settings()
    monkeypatch.setenv(variable.name, text)
    tensors = dense(1, 3)
    assert attention(*tensors).shape == tensors[0].shape
    assert explain(*tensors).source == "the default order of cpu"


def test_the_table_is_that_of_the_documentation():
    fields = [variable.field for variable in VARIABLES]
    assert fields == list(Settings.__dataclass_fields__)
    assert [variable.name for variable in VARIABLES] == [f"HAL_ATTN_{field.upper()}" for field in fields]
    assert all(variable.values and variable.meaning for variable in VARIABLES)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("HAL_ATTN_BAKCEND", "did you mean HAL_ATTN_BACKEND?"), ("HAL_ATTN_" + "Z" * 30, "known are: HAL_ATTN_PLATFORM")],
)
def test_an_unknown_name_warns_with_the_closest(name, remedy, monkeypatch):
    tensors = dense(1, 3)
    attention(*tensors)
    monkeypatch.setenv(name, "x")
    with pytest.warns(UserWarning, match="is ignored") as caught:
        attention(*tensors)
    assert name in str(caught[0].message)
    assert remedy in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*tensors)


def test_nothing_is_read_at_import():
    wrong = {name: text for name, text, _ in WRONG} | {"HAL_ATTN_BAKCEND": "x"}
    code = "import sys, hal_attn; print([name for name in sys.modules if name.startswith('hal_attn_')])"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env={**os.environ, **wrong}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_a_changed_variable_takes_effect_at_the_next_call(monkeypatch):
    first, second = BatchedFake("first"), BatchedFake("second")
    on_the_cpu(monkeypatch, first, second)
    tensors = dense(1, 3)

    def served():
        before = len(first.calls), len(second.calls)
        attention(*tensors)
        return len(first.calls) - before[0], len(second.calls) - before[1]

    assert [served(), served()] == [(1, 0), (1, 0)]
    monkeypatch.setenv("HAL_ATTN_BACKEND", "second")
    assert [served(), served()] == [(0, 1), (0, 1)]
    monkeypatch.setenv("HAL_ATTN_BACKEND", "first")
    assert served() == (1, 0)
    monkeypatch.setenv("HAL_ATTN_BACKEND", "")
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "first")
    assert served() == (0, 1)
    monkeypatch.delenv("HAL_ATTN_DISABLED_BACKENDS")
    assert served() == (1, 0)
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "cpu")
    assert served() == (0, 0)
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "fake")
    assert served() == (1, 0)


def test_platform_allows_only_that_one(monkeypatch):
    install(monkeypatch, FakePlatform("other", BatchedFake("other_one"), device_type="meta"), CpuPlatform())
    tensors = dense(1, 3)
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "other")
    with pytest.raises(UnsupportedAttentionError, match="HAL_ATTN_PLATFORM=other allows only that one; unset it"):
        attention(*tensors)
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "gpu")
    with pytest.raises(ConfigurationError, match=r"HAL_ATTN_PLATFORM: got 'gpu'; allowed: other, cpu$"):
        attention(*tensors)
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "othr")
    with pytest.raises(ConfigurationError, match=r"allowed: other, cpu \(did you mean other\?\)"):
        attention(*tensors)


def test_backend_is_tried_in_order(monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("plain", claims(softcap=False)), BatchedFake("capped"))
    monkeypatch.setenv("HAL_ATTN_BACKEND", "plain,capped")
    assert select_backend(*dense()).name == "plain"
    selection = explain(*dense(), softcap=1.0)
    assert (selection.chosen.name, selection.source) == ("capped", "HAL_ATTN_BACKEND plain,capped")


@pytest.mark.parametrize("name", ["HAL_ATTN_BACKEND", "HAL_ATTN_DISABLED_BACKENDS"])
def test_unknown_backend_in_a_variable(name, monkeypatch):
    monkeypatch.setenv(name, "cpu_mathh")
    with pytest.raises(ConfigurationError) as caught:
        attention(*dense())
    assert str(caught.value).startswith(f"{name}: got unknown backend 'cpu_mathh'; allowed: ")
    assert "cpu_flash, cpu_sdpa, cpu_math" in str(caught.value)
    assert "did you mean cpu_math?" in str(caught.value)


def test_disabled_backends_are_never_chosen_and_shown(monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("first"), BatchedFake("second"))
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "first")
    assert explain(*dense()).chosen.name == "second"
    assert "first   refused\n" in str(explain(*dense()))
    assert "HAL_ATTN_DISABLED_BACKENDS names it" in str(explain(*dense()))
    with pytest.raises(UnsupportedAttentionError, match="HAL_ATTN_DISABLED_BACKENDS names it"):
        attention(*dense(), backend="first")
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "first,second")
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(*dense())
    assert [name for name, _ in caught.value.refusals] == ["first", "second"]


def test_fallback(monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("good"), BatchedFake("plain", claims(softcap=False)))
    call = {"softcap": 1.0, "backend": "plain"}
    for value in ("", "error"):
        monkeypatch.setenv("HAL_ATTN_FALLBACK", value)
        with pytest.raises(UnsupportedAttentionError, match="HAL_ATTN_FALLBACK=warn"):
            attention(*dense(), **call)
    monkeypatch.setenv("HAL_ATTN_FALLBACK", "allow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*dense(), **call)
    selection = explain(*dense(), **call)
    assert (selection.chosen.name, selection.source) == ("good", "fallback from backend plain")
    assert "HAL_ATTN_FALLBACK=allow" in str(selection)
    monkeypatch.setenv("HAL_ATTN_FALLBACK", "warn")
    for ask in (attention, select_backend):
        with pytest.warns(
            UserWarning, match=r"backend plain refused.*good \(plain: softcap: have 1.0, need off\)"
        ) as caught:
            ask(*dense(), **call)
        assert [warning.filename for warning in caught] == [__file__]


def test_fallback_where_nothing_takes_the_call(monkeypatch):
    none = claims(softcap=False)
    on_the_cpu(monkeypatch, BatchedFake("one", none), BatchedFake("two", none))
    monkeypatch.setenv("HAL_ATTN_FALLBACK", "allow")
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(*dense(), softcap=1.0, backend="two")
    assert [name for name, _ in caught.value.refusals] == ["two", "one"]


@pytest.mark.parametrize("rejects", [True, False])
@pytest.mark.parametrize("policy", ["", "platform", "reject", "compact"])
def test_empty_sequences(policy, rejects, monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("one"), rejects_empty_sequences=rejects)
    query, key, value, sequences = packed([3, 0, 2, 0], [4, 0, 0, 1])
    monkeypatch.setenv("HAL_ATTN_EMPTY_SEQUENCES", "compact")
    want = varlen_attention(query, key, value, sequences=sequences)
    assert want[3:].eq(0).all()
    monkeypatch.setenv("HAL_ATTN_EMPTY_SEQUENCES", policy)
    if policy == "compact" or (policy != "reject" and not rejects):
        torch.testing.assert_close(varlen_attention(query, key, value, sequences=sequences), want, rtol=0, atol=0)
        return
    for _ in range(2):
        with pytest.raises(InvalidAttentionInputError) as caught:
            varlen_attention(query, key, value, sequences=sequences)
        message = str(caught.value)
        assert "sequence 1 with 0 queries and 0 keys (and 2 more)" in message
        assert ("HAL_ATTN_EMPTY_SEQUENCES=reject" if policy == "reject" else "the platform fake") in message
        assert "HAL_ATTN_EMPTY_SEQUENCES=compact" in message
        assert "without_empty()" in message


def test_select_backend_rejects_empty_sequences_as_the_call_does(monkeypatch):
    query, key, value, sequences = packed([3, 0, 2])
    monkeypatch.setenv("HAL_ATTN_EMPTY_SEQUENCES", "reject")
    with pytest.raises(InvalidAttentionInputError, match="sequence 1 with 0 queries"):
        select_backend(query, key, value, sequences=sequences)


def test_rejecting_concerns_empty_sequences_only(monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("one"), rejects_empty_sequences=True)
    query, key, value, sequences = packed([3, 0, 2])
    assert varlen_attention(query, key, value, sequences=sequences.without_empty()).shape == query.shape


def test_simulate_without_simulated_kernels(monkeypatch):
    install(monkeypatch, FakePlatform("ascend", device_type="npu"), CpuPlatform())
    attention(*dense())
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "ascend")
    for call in (lambda: attention(*dense()), backends):
        with pytest.raises(UnsupportedAttentionError) as caught:
            call()
        assert "HAL_ATTN_SIMULATE=ascend: ascend brings no simulated kernels" in str(caught.value)
        assert "unset it" in str(caught.value)


def test_simulate_runs_the_simulated_platform_on_cpu_tensors(monkeypatch):
    adapter = BatchedFake("npu_kernel")
    simulated = FakePlatform("ascend", adapter)
    simulated.simulated = True
    install(monkeypatch, FakePlatform("ascend", device_type="npu", simulated=simulated), CpuPlatform())
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "ascend")
    attention(*dense())
    assert len(adapter.calls) == 1
    assert "platform  ascend (SIMULATED)" in str(explain(*dense()))
    assert [(status.name, status.simulated) for status in platforms()] == [("ascend", True), ("cpu", False)]
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "rocm")
    with pytest.raises(ConfigurationError, match="HAL_ATTN_SIMULATE: got 'rocm'; allowed: ascend"):
        attention(*dense())
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cpu")
    with pytest.raises(UnsupportedAttentionError, match=r"cpu brings no simulated kernels .platforms that do: ascend"):
        attention(*dense())
    monkeypatch.delenv("HAL_ATTN_SIMULATE")
    attention(*dense())
    assert len(adapter.calls) == 1


def test_simulate_and_another_platform_contradict_each_other(monkeypatch):
    simulated = FakePlatform("ascend", BatchedFake("npu_kernel"))
    install(monkeypatch, FakePlatform("ascend", device_type="npu", simulated=simulated), CpuPlatform())
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "ascend")
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "cpu")
    with pytest.raises((ConfigurationError, UnsupportedAttentionError), match="HAL_ATTN_PLATFORM"):
        attention(*dense())


RIGHT_Q, RIGHT_K = torch.tensor([0, 6, 10]), torch.tensor([0, 4, 10])


@pytest.mark.parametrize(
    ("argument", "host", "host_k"),
    [
        ("cu_seqlens_host", [0, 5, 10], [0, 4, 10]),
        ("cu_seqlens_k_host", [0, 6, 10], [0, 5, 10]),
        ("cu_seqlens_k_host", [0, 6, 10], [0, 6, 10]),
    ],
)
def test_validate_full_finds_host_offsets_that_differ(argument, host, host_k, monkeypatch):
    query, key, value, _ = packed([6, 4], [4, 6])
    given = {"cu_seqlens": RIGHT_Q, "cu_seqlens_k": RIGHT_K}
    monkeypatch.setenv("HAL_ATTN_VALIDATE", "full")
    varlen_attention(query, key, value, **given, cu_seqlens_host=[0, 6, 10], cu_seqlens_k_host=[0, 4, 10])
    for _ in range(2):
        with pytest.raises(InvalidAttentionInputError) as caught:
            varlen_attention(query, key, value, **given, cu_seqlens_host=host, cu_seqlens_k_host=host_k)
        assert caught.value.argument == argument
        wrong = tuple(host if argument == "cu_seqlens_host" else host_k)
        assert str(wrong) in str(caught.value)


def test_validate_is_fast_by_default(monkeypatch):
    """The host copy is taken at its word, so a call needs no look at the device's offsets."""
    query, key, value, _ = packed([6, 4])
    want = varlen_attention(query, key, value, sequences=PackedSequences.from_lengths([5, 5]))
    for text in ("", "fast"):
        monkeypatch.setenv("HAL_ATTN_VALIDATE", text)
        got = varlen_attention(query, key, value, cu_seqlens=RIGHT_Q, cu_seqlens_host=[0, 5, 10])
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.fixture
def logger():
    """The package's logger, put back as it was."""
    log = logging.getLogger("hal_attn")
    level, handlers = log.level, list(log.handlers)
    yield log
    log.setLevel(level)
    log.handlers[:] = handlers


def test_log_level_shows_the_choice(monkeypatch, caplog, logger):
    attention(*dense())
    assert "cpu_flash" not in caplog.text
    monkeypatch.setenv("HAL_ATTN_LOG_LEVEL", "INFO")
    attention(*dense())
    assert "cpu_flash, by the default order of cpu, for batch 2, 5 queries, 5 keys" in caplog.text
    caplog.clear()
    monkeypatch.setenv("HAL_ATTN_LOG_LEVEL", "ERROR")
    attention(*dense())
    assert caplog.text == ""


def test_log_level_ends_with_the_variable(monkeypatch, caplog, logger):
    monkeypatch.setenv("HAL_ATTN_LOG_LEVEL", "INFO")
    attention(*dense())
    caplog.clear()
    monkeypatch.delenv("HAL_ATTN_LOG_LEVEL")
    attention(*dense(2, 6))
    assert caplog.text == ""


def test_log_level_shows_the_choice_where_nobody_configured_logging():
    code = (
        "import torch, hal_attn; t = torch.ones(1, 2, 1, 4); hal_attn.attention(t, t, t); hal_attn.attention(t, t, t)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HAL_ATTN_LOG_LEVEL": "info"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr.count("hal_attn INFO: cpu_flash, by the default order of cpu") == 1
