"""Platforms as plugins: one that is broken never hides another, and a minimal backend ports as it is."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hal_attn_cpu.platform import CpuPlatform

from hal_attn import (
    Capabilities,
    UnsupportedAttentionError,
    attention,
    backends,
    explain,
    platforms,
    select_backend,
)
from hal_attn.platform import API_VERSION
from hal_attn.refusal import Refusal
from hal_attn.registry import Registry, default_registry
from tests.fakes import (
    ABSENT,
    FLOAT32,
    BatchedFake,
    FakePlatform,
    fresh,  # noqa: F401
    install,
    on_the_cpu,
    registry_of,
)
from tests.support import dense


def raising(error):
    def load():
        raise error

    return load


BROKEN = {
    "import error": (raising(ImportError("no module named vendorlib")), "ImportError: no module named vendorlib"),
    "runtime error": (raising(RuntimeError("no driver\n  found")), "RuntimeError: no driver found"),
    "os error": (raising(OSError("libvendor.so")), "OSError: libvendor.so"),
    "assertion": (raising(AssertionError()), "AssertionError"),
    "exit": (raising(SystemExit(3)), "SystemExit: 3"),
    "no platform": (lambda: dict, "gives a dict, not a hal_attn.Platform"),
    "nothing": (lambda: None, "gives a NoneType"),
    "needs arguments": (lambda: FakePlatform, "TypeError"),
    "another name": (lambda: lambda: FakePlatform("other"), "called vendor, the platform other"),
    "older contract": (lambda: lambda: FakePlatform("vendor", api_version=API_VERSION - 1), "for version 0 of"),
    "newer contract": (lambda: lambda: FakePlatform("vendor", api_version=API_VERSION + 1), "for version 2 of"),
    "name twice": (
        lambda: lambda: FakePlatform("vendor", BatchedFake("v"), BatchedFake("v")),
        "two of its backends have one name: v",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_kept_with_its_reason(case, monkeypatch):
    load, reason = BROKEN[case]
    registry = Registry({"cpu": _cpu, "vendor": load})
    install(monkeypatch, registry=registry)
    ((name, why),) = ((broken.name, broken.reason) for broken in registry.broken)
    assert name == "vendor"
    assert reason in why
    assert attention(*dense()).shape == dense()[0].shape
    status = {status.name: status for status in platforms()}
    assert status["cpu"].available
    assert not status["vendor"].available
    assert reason in status["vendor"].reason
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "vendor")
    with pytest.raises(ValueError, match="HAL_ATTN_PLATFORM: got 'vendor'; allowed: cpu") as caught:
        attention(*dense())
    assert "vendor is broken" in str(caught.value)


def _cpu():
    return CpuPlatform


def test_a_broken_plugin_does_not_hide_one_that_comes_after(monkeypatch):
    install(monkeypatch, registry=Registry({"vendor": raising(OSError("x")), "cpu": _cpu}))
    assert select_backend(*dense()).name == "cpu_flash"


class OwnsRaises(FakePlatform):
    def owns(self, device):
        raise RuntimeError("the driver is gone")


class DevicesRaise(FakePlatform):
    def devices(self):
        raise RuntimeError("the driver is gone")


class DetectsNothing(FakePlatform):
    def detect(self):
        return None


class SimulationRaises(FakePlatform):
    def simulation(self, generation):
        raise RuntimeError("the driver is gone")


@pytest.mark.parametrize("kind", [OwnsRaises, DevicesRaise, DetectsNothing, SimulationRaises])
@pytest.mark.parametrize("first", [True, False])
def test_a_platform_that_breaks_later_does_not_break_another(kind, first, monkeypatch):
    vendor = kind("vendor", BatchedFake("vendor_kernel"), device_type="npu")
    install(monkeypatch, *((vendor, CpuPlatform()) if first else (CpuPlatform(), vendor)))
    assert attention(*dense()).shape == dense()[0].shape
    assert {status.name for status in platforms()} == {"vendor", "cpu"}
    assert {"cpu_flash", "vendor_kernel"} <= {status.name for status in backends()}
    assert backends("cpu")[0].platform == "cpu"


def test_a_device_list_that_cannot_be_had_is_the_reason(monkeypatch):
    install(monkeypatch, DevicesRaise("vendor", device_type="npu"), CpuPlatform())
    status = platforms()[0]
    assert not status.available
    assert "RuntimeError: the driver is gone" in status.reason


def test_a_detection_that_raises_is_the_reason_and_asked_once(monkeypatch):
    vendor = FakePlatform("vendor", BatchedFake("vendor_kernel"), detects=AssertionError("torch_npu without CANN"))
    install(monkeypatch, vendor, CpuPlatform())
    for _ in range(3):
        assert select_backend(*dense()).name == "cpu_flash"
        assert "detection failed: AssertionError: torch_npu without CANN" in platforms()[0].reason
    assert vendor.asked == 1
    assert not backends()[0].usable
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "vendor")
    with pytest.raises(UnsupportedAttentionError, match="vendor owns it, but: detection failed: AssertionError"):
        attention(*dense())


class RefusalsRaise(BatchedFake):
    def refusals(self, request):
        raise RuntimeError("the driver is gone")


def test_a_backend_whose_rules_raise_does_not_break_the_call(monkeypatch):
    on_the_cpu(monkeypatch, RefusalsRaise("one"), BatchedFake("two"))
    selection = explain(*dense())
    assert selection.chosen.name == "two"
    assert "RuntimeError: the driver is gone" in str(selection)


def test_inventory(monkeypatch):
    missing = Refusal("installed", "no vendorlib", "vendorlib")
    on_the_cpu(
        monkeypatch,
        BatchedFake("ready"),
        BatchedFake("missing", missing=missing, install="pip install vendorlib"),
        BatchedFake("broken", missing=RuntimeError("bad build"), install="pip install vendorlib"),
    )
    found = {status.name: status for status in backends("cpu")}
    assert [found[name].usable for name in ("ready", "missing", "broken")] == [True, False, False]
    assert found["missing"].reason == replace(missing, hint="install it with: pip install vendorlib")
    assert found["missing"].install == "pip install vendorlib"
    assert "broken: RuntimeError: bad build" in found["broken"].reason.have
    assert {status.platform for status in backends()} == {"fake", "cpu"}
    with pytest.raises(UnsupportedAttentionError, match=r"no platform runs tensors on device meta: .*fake \(cpu\)"):
        backends("meta")


def test_a_platform_without_a_device_shows_its_backends_and_why(monkeypatch):
    vendor = FakePlatform("vendor", BatchedFake("vendor_kernel"), device_type="npu", detects=ABSENT)
    install(monkeypatch, vendor, CpuPlatform())
    status = backends()[0]
    assert (status.name, status.usable) == ("vendor_kernel", False)
    assert (status.reason.have, status.reason.hint) == ("no device of it is here", "plug one in")


def test_the_device_decides_between_platforms(monkeypatch):
    query, key, value = (tensor.to("meta") for tensor in dense())
    install(monkeypatch, FakePlatform("one", device_type="meta", detects=ABSENT), CpuPlatform())
    with pytest.raises(UnsupportedAttentionError, match="one owns it, but: no device of it is here"):
        attention(query, key, value)
    absent = FakePlatform("one", BatchedFake("kernel_one"), device_type="meta", detects=ABSENT)
    here = FakePlatform("two", BatchedFake("kernel_two"), device_type="meta")
    install(monkeypatch, absent, here, CpuPlatform())
    assert select_backend(query, key, value).name == "kernel_two"
    assert select_backend(*dense()).name == "cpu_flash"


def test_the_installed_platforms_are_found_by_entry_point():
    names = [platform.name for platform in default_registry().platforms]
    assert {"ascend", "cpu", "cuda", "rocm"} <= set(names)
    assert default_registry().broken == ()
    assert default_registry() is default_registry()


def test_unnamed_backends_follow_the_order(monkeypatch):
    class Short(FakePlatform):
        def default_order(self, request):
            return ("two", "gone")

    install(monkeypatch, Short("fake", BatchedFake("one"), BatchedFake("two")))
    assert [backend.name for backend, _ in explain(*dense()).considered] == ["two", "one"]


def test_a_backend_claims_nothing_until_it_does(monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("silent", Capabilities()), BatchedFake("bare", FLOAT32))
    assert explain(*dense()).chosen.name == "bare"
    query, key, value = dense(2, 5, 7, value_head_dim=8, kv_heads=2, dtype=torch.float16)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    options = {
        "causal": True,
        "window_size": (1, 2),
        "mask": torch.ones(1, 1, 5, 7, dtype=torch.bool),
        "key_padding_mask": torch.ones(2, 7, dtype=torch.bool),
        "softcap": 1.0,
        "sinks": torch.zeros(4),
        "alibi_slopes": torch.zeros(4),
        "dropout_p": 0.5,
        "deterministic": True,
        "return_lse": True,
    }
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(query, key, value, **options)
    (_, silent), (_, bare) = caught.value.refusals
    rules = {*options, "dtype", "value_head_dim", "heads", "gradients"}
    assert {refusal.rule for refusal in silent} == rules
    assert {refusal.rule for refusal in bare} == rules


def test_only_options_that_are_set_reach_a_backend(monkeypatch):
    backend = BatchedFake("one")
    on_the_cpu(monkeypatch, backend)
    attention(*dense(), scale=None, causal=False, window_size=(-1, None), softcap=0.0, dropout_p=0.0)
    attention(*dense(), scale=0.0, window_size=(2, 0), return_lse=True)
    assert backend.calls == [{}, {"scale": 0.0, "causal": True, "window_size": (2, 0), "return_lse": True}]


def test_a_registry_made_by_hand_serves_the_inventory_without_the_installed_ones():
    registry = registry_of(FakePlatform("fake", BatchedFake("one")))
    assert [status.name for status in platforms(registry)] == ["fake"]
    assert [status.name for status in backends("cpu", registry)] == ["one"]


def test_a_module_first_imported_over_fakes_sees_the_installed_platforms_once_they_are_gone(monkeypatch, tmp_path):
    """As the verbs of the command line, which are imported where they are first used."""
    (tmp_path / "late_verb.py").write_text("from hal_attn.registry import default_registry\n")
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as patched:
        fakes = install(patched, FakePlatform("fake"))
        late = import_module("late_verb")
        assert late.default_registry() is fakes
    assert late.default_registry() is default_registry()
    assert late.default_registry().platform("cuda") is not None
