"""`hal-attn env`: the whole table, the values now, and what is wrong with them."""

import json

import pytest

from hal_attn.settings import VARIABLES
from tests.cli.conftest import assert_plain, words
from tests.fakes import FakeBackend, FakePlatform, install


def test_every_variable_is_shown_whole(run):
    result = run("env")
    assert result.exit_code == 0
    assert_plain(result.stdout)
    text = words(result.stdout)
    for variable in VARIABLES:
        assert variable.name in text
        assert f"{variable.meaning} allowed {variable.values} now not set" in text
        assert f"(default: {variable.default})" in text or not variable.default
    assert "All is well" in text


def test_json_has_the_same(run, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_VALIDATE", "full")
    result = run("env", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert list(found) == ["ok", "variables", "unknown"]
    assert found["ok"] is True
    assert found["unknown"] == []
    rows = {row["name"]: row for row in found["variables"]}
    assert list(rows) == [variable.name for variable in VARIABLES]
    assert rows["HAL_ATTN_VALIDATE"] == {
        "name": "HAL_ATTN_VALIDATE",
        "allowed": "fast, full",
        "meaning": "full also compares host with device offsets, which waits for the device",
        "default": "fast",
        "value": "full",
        "problem": None,
    }
    assert rows["HAL_ATTN_BACKEND"]["value"] is None


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("HAL_ATTN_FALLBACK", "maybe", "got 'maybe'; allowed: one of error, warn, allow"),
        ("HAL_ATTN_BACKEND", "cpu_flsh", "cpu_flash"),
        ("HAL_ATTN_BACKEND", "cpu_flash,,cpu_math", "none of them empty"),
        ("HAL_ATTN_DISABLED_BACKENDS", "nothing_like_it", "cpu_flash, cpu_sdpa"),
        ("HAL_ATTN_PLATFORM", "cuba", "got 'cuba'; allowed: "),
        ("HAL_ATTN_LOG_LEVEL", "LOUD", "DEBUG"),
        ("HAL_ATTN_SIMULATE", "cpu", "ascend, rocm, cuda"),
    ],
)
def test_wrong_values(run, monkeypatch, name, value, problem):
    monkeypatch.setenv(name, value)
    result = run("env")
    assert result.exit_code == 1
    assert_plain(result.stdout)
    text = words(result.stdout)
    assert f"now {value}" in text
    assert "WRONG" in text
    assert problem in text
    assert f"1 wrong: {name}." in text
    as_json = run("env", "--json")
    assert as_json.exit_code == 1
    found = json.loads(as_json.stdout)
    assert found["ok"] is False
    assert [row["name"] for row in found["variables"] if row["problem"]] == [name]


@pytest.mark.parametrize(
    ("name", "closest"),
    [("HAL_ATTN_BAKEND", "HAL_ATTN_BACKEND"), ("HAL_ATTN_SIM", "HAL_ATTN_SIMULATE"), ("HAL_ATTN_QQ", None)],
)
def test_unknown_names(run, monkeypatch, name, closest):
    monkeypatch.setenv(name, "x")
    result = run("env")
    assert result.exit_code == 1
    text = words(result.stdout)
    assert f"{name} now x UNKNOWN it is ignored" in text
    assert (f"did you mean {closest}?" in text) == (closest is not None)
    found = json.loads(run("env", "--json").stdout)
    assert found["unknown"] == [{"name": name, "value": "x", "closest": closest}]


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_value_counts_as_not_set(run, monkeypatch, value):
    monkeypatch.setenv("HAL_ATTN_FALLBACK", value)
    result = run("env")
    assert result.exit_code == 0
    assert "now not set (default: error)" in words(result.stdout)


def test_a_simulation_that_breaks_is_wrong(run, monkeypatch):
    class Breaking(FakePlatform):
        def simulation(self, generation):
            raise RuntimeError(f"no kernels of {generation}")

    install(monkeypatch, Breaking("ascend", FakeBackend("a")))
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "ascend:310P")
    result = run("env")
    assert result.exit_code == 1
    assert "the simulation does not start: RuntimeError: no kernels of 310P" in words(result.stdout)
