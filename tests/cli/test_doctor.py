"""`hal-attn doctor`: everything that is here, and for all else why not and what to do; nothing breaks it."""

import json

import pytest
from hal_attn_cpu.platform import CpuPlatform

from hal_attn.platform import DeviceInfo
from hal_attn.refusal import Refusal
from hal_attn.registry import Registry
from tests.cli.conftest import assert_plain, words
from tests.fakes import ABSENT, FakeBackend, FakePlatform, install

MISSING = Refusal("installed", "nothing", "the library flashy 3", "")


class Cluster(FakePlatform):
    """Eight equal devices and one other."""

    def devices(self):
        equal = [DeviceInfo(f"fast:{index}", "Fast 9000", "f90", 139 * 2**30) for index in range(8)]
        return (*equal, DeviceInfo("fast:8", "Slow 1"))


def broken(message):
    def load():
        raise OSError(message)

    return load


def test_the_installed_platforms(run):
    result = run("doctor")
    assert result.exit_code == 0
    assert_plain(result.stdout)
    text = words(result.stdout)
    for name in ("ascend", "cpu", "cuda", "rocm", "cpu_flash", "cpu_sdpa", "cpu_math"):
        assert name in text
    assert "All is well: " in text


def test_devices_versions_backends_and_remedies(run, monkeypatch):
    fast = Cluster("fast", FakeBackend("f1"), FakeBackend("f2", missing=MISSING, install="pip install flashy"))
    absent = FakePlatform("absent", FakeBackend("a1"), FakeBackend("a2"), detects=ABSENT)
    install(monkeypatch, fast, absent)
    result = run("doctor")
    assert result.exit_code == 0
    assert_plain(result.stdout)
    text = words(result.stdout)
    assert (
        "fast usable a fake device is here fast:0 to fast:7: Fast 9000, f90, 139.0 GiB fast:8: Slow 1 fake 1.0" in text
    )
    assert "absent not usable no device of it is here remedy: plug one in" in text
    assert "f1 fast usable" in text
    assert "installed: have nothing, need the library flashy 3" in text
    assert "remedy: install it with: pip install flashy" in text
    assert text.count("available: have no device of it is here") == 1, "a1 and a2 share one row"
    assert text.endswith("All is well: fast usable, with 1 of 4 backends.")


def test_json(run, monkeypatch):
    absent = FakePlatform("absent", FakeBackend("a1"), detects=ABSENT)
    install(monkeypatch, CpuPlatform(), absent)
    result = run("doctor", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert list(found) == ["ok", "problems", "versions", "platforms", "backends", "environment"]
    assert (found["ok"], found["problems"]) == (True, [])
    assert list(found["versions"]) == ["hal_attn", "python", "torch", "system"]
    assert found["platforms"][1] == {
        "name": "absent",
        "available": False,
        "reason": "no device of it is here",
        "remedy": "plug one in",
        "versions": {},
        "devices": [],
        "process_group_backend": "gloo",
        "simulated": False,
        "broken": False,
    }
    assert list(found["platforms"][0]["devices"][0]) == ["device", "name", "architecture", "memory_bytes"]
    assert found["backends"][-1] == {
        "name": "a1",
        "platform": "absent",
        "usable": False,
        "reason": {
            "rule": "available",
            "have": "no device of it is here",
            "need": "a device of absent",
            "hint": "plug one in",
        },
        "install": "",
        "simulated": False,
        "remedy": "plug one in",
    }
    assert list(found["environment"]) == ["ok", "variables", "unknown"]


def test_simulated_is_said(run, monkeypatch):
    simulated = FakePlatform("ascend", FakeBackend("a"))
    simulated.simulated = True
    real = FakePlatform("ascend", FakeBackend("a"), device_type="npu", detects=ABSENT, simulated=simulated)
    install(monkeypatch, real, CpuPlatform())
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "ascend")
    result = run("doctor")
    assert result.exit_code == 0
    text = words(result.stdout)
    assert "ascend SIMULATED a fake device is here" in text
    assert "a ascend SIMULATED" in text
    assert "HAL_ATTN_SIMULATE ascend" in text
    reason = "HAL_ATTN_SIMULATE gives tensors on the CPU to ascend, simulated"
    assert f"cpu not usable {reason} remedy: unset HAL_ATTN_SIMULATE" in text
    assert text.endswith("All is well: ascend (SIMULATED) usable, with 1 of 4 backends.")
    found = json.loads(run("doctor", "--json").stdout)
    assert [(status["simulated"], status["available"]) for status in found["platforms"]] == [
        (True, True),
        (False, False),
    ]
    assert [status["name"] for status in found["backends"] if status["usable"]] == ["a"]


def test_what_a_variable_excludes_is_not_usable(run, monkeypatch):
    install(monkeypatch, FakePlatform("fast", FakeBackend("f"), device_type="meta"), CpuPlatform())
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "cpu")
    text = words(run("doctor").stdout)
    assert "fast not usable HAL_ATTN_PLATFORM=cpu excludes it fake 1.0 remedy: unset HAL_ATTN_PLATFORM" in text
    assert text.endswith("All is well: cpu usable, with 3 of 4 backends.")


def test_broken_plugins_are_shown_and_hide_nothing(run, monkeypatch):
    message = "libvendor.so: cannot open [red]shared object file[/red]"
    sources = {"bad": broken(message), "cpu": CpuPlatform, "odd": lambda: object()}
    install(monkeypatch, registry=Registry(sources))
    result = run("doctor")
    assert result.exit_code == 1
    assert_plain(result.stdout)
    text = words(result.stdout)
    assert f"bad BROKEN broken plugin: OSError: {message} remedy: reinstall or remove it" in text
    assert "odd BROKEN" in text
    assert "cpu_flash cpu usable" in text
    assert "- the plugin bad is broken; reinstall or remove it" in text
    found = json.loads(run("doctor", "--json").stdout)
    assert found["ok"] is False
    assert [status["name"] for status in found["platforms"] if status["broken"]] == ["bad", "odd"]


def test_a_vendor_that_raises_is_shown(run, monkeypatch):
    class Unlistable(FakePlatform):
        def devices(self):
            raise RuntimeError("driver too old")

    install(
        monkeypatch,
        FakePlatform("raises", FakeBackend("r"), detects=AssertionError("no driver")),
        Unlistable("unlistable", FakeBackend("u", missing=OSError("bad library"))),
        CpuPlatform(),
    )
    result = run("doctor")
    assert result.exit_code == 0
    text = words(result.stdout)
    assert "raises not usable detection failed: AssertionError: no driver" in text
    assert "unlistable not usable its devices cannot be listed: RuntimeError: driver too old" in text
    assert "have broken: OSError: bad library, need a library that loads" in text


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ({}, "no platform is usable"),
        ({"bad": broken("gone")}, "the plugin bad is broken"),
        ({"away": lambda: lambda: FakePlatform("away", detects=ABSENT)}, "no platform is usable"),
    ],
)
def test_no_platform_at_all(run, monkeypatch, sources, problem):
    install(monkeypatch, registry=Registry(sources))
    result = run("doctor")
    assert result.exit_code == 1
    assert problem in words(result.stdout)


def test_a_platform_that_alone_is_allowed_must_be_usable(run, monkeypatch):
    install(monkeypatch, FakePlatform("absent", FakeBackend("a"), detects=ABSENT), CpuPlatform())
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "absent")
    result = run("doctor")
    assert result.exit_code == 1
    assert "- HAL_ATTN_PLATFORM=absent is not usable" in words(result.stdout)


def test_wrong_variables_are_shown_and_hide_nothing(run, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_FALLBACK", "maybe")
    monkeypatch.setenv("HAL_ATTN_BAKEND", "cpu_math")
    monkeypatch.setenv("HAL_ATTN_VALIDATE", "full")
    result = run("doctor")
    assert result.exit_code == 1
    assert_plain(result.stdout)
    text = words(result.stdout)
    assert "cpu_math cpu usable" in text
    assert "HAL_ATTN_VALIDATE full" in text
    assert "- HAL_ATTN_FALLBACK: got 'maybe'; allowed: one of error, warn, allow" in text
    assert "- HAL_ATTN_BAKEND: it is ignored; did you mean HAL_ATTN_BACKEND?" in text
    assert len(json.loads(run("doctor", "--json").stdout)["problems"]) == 2


def test_names_that_the_locale_cannot_print(spawn):
    result = spawn("doctor", PYTHONIOENCODING="ascii", HAL_ATTN_CACHE_DIR="/tmp/日本")
    assert (result.returncode, result.stderr) == (0, "")
    assert "/tmp/??" in result.stdout


def test_a_process_of_its_own(spawn):
    result = spawn("doctor")
    assert (result.returncode, result.stderr) == (0, "")
    assert_plain(result.stdout)
