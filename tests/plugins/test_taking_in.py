"""A plugin that cannot be taken in is reported by name, with what is needed, and never breaks another."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hal_attn_cpu.platform import CpuPlatform

from hal_attn import ConfigurationError, Platform, UnsupportedAttentionError, attention, backends, platforms
from hal_attn.capabilities import Capabilities
from hal_attn.platform import API_VERSION
from hal_attn.registry import Registry
from tests.cli.conftest import run, words  # noqa: F401
from tests.fakes import fresh, install  # noqa: F401
from tests.plugins.vendors import GONE, SHOWN, Once, Vendor, backend, beside_the_cpu, giving, variant
from tests.support import dense


def undeclared():
    """A whole platform that says nothing about the contract that it was written for."""
    body = {name: value for name, value in vars(Vendor).items() if name != "api_version" and name[:2] != "__"}
    return type("Undeclared", (Platform,), {**body, "__init__": Vendor.__init__})


@dataclass  # It compares by value, so it has no hash.
class Unhashable(Vendor):
    pass


class MoreMethods(Vendor):
    """Written for a contract that asks for less: it could not even be made."""

    api_version = API_VERSION - 1
    __abstractmethods__ = frozenset({"detect"})


BROKEN = {
    "no version": (undeclared(), "it does not say which version of the platform contract it was written for"),
    "version of another type": (variant(api_version="1"), "api_version: got '1'"),
    "older": (
        variant(api_version=API_VERSION - 1),
        "written for version 0 of the platform contract, this hal_attn has",
    ),
    "older, remedy": (variant(api_version=API_VERSION - 1), "update the plugin"),
    "newer": (
        variant(api_version=API_VERSION + 1),
        "written for version 2 of the platform contract, this hal_attn has",
    ),
    "newer, remedy": (variant(api_version=API_VERSION + 1), "update hal-attn"),
    "older, and not to be made": (MoreMethods, "written for version 0"),
    "no name": (variant(name=None), "name: got None"),
    "another name": (variant(name="cpu"), "the entry point is called vendor, the platform cpu"),
    "no device type": (variant(device_type=None), "device_type: got None"),
    "no process groups": (variant(process_group_backend=7), "process_group_backend: got 7"),
    "no hash": (Unhashable, "unhashable"),
    "making it raises": (variant(__init__=giving(GONE)), SHOWN),
    "making it ends the process": (variant(__init__=giving(SystemExit(3))), "SystemExit: 3"),
    "backends() raises": (variant(backends=giving(GONE)), SHOWN),
    "backends() returns None": (variant(backends=giving(None)), "backends() gave a NoneType"),
    "backends() returns classes": (variant(backends=giving((Vendor,))), "backends() gave a ABCMeta, not"),
    "a backend without a name": (variant(backends=giving((backend(name=None),))), "Backend.name"),
    "a backend without claims": (variant(backends=giving((backend(capabilities=None),))), "vendor_one.capabilities"),
    "claims of another kind": (
        variant(backends=giving((backend(capabilities={}),))),
        "vendor_one.capabilities: got a dict",
    ),
    "an install that is no text": (variant(backends=giving((backend(install=3),))), "vendor_one.install: got 3"),
    "one name twice": (
        variant(backends=giving((backend(), backend()))),
        "two of its backends have one name: vendor_one",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_it_is_reported_by_name_and_breaks_nothing(case, monkeypatch, run):  # noqa: F811
    vendor, reason = BROKEN[case]
    registry = beside_the_cpu(monkeypatch, vendor)
    assert [broken.name for broken in registry.broken] == ["vendor"]
    assert reason in registry.broken[0].reason
    status = {status.name: status for status in platforms()}
    assert set(status) == {"vendor", "cpu"}
    assert not status["vendor"].available
    assert reason in status["vendor"].reason
    assert status["cpu"].available
    assert {status.platform for status in backends()} == {"cpu"}
    assert attention(*dense()).shape == dense()[0].shape
    with pytest.raises(UnsupportedAttentionError, match="vendor is broken") as caught:
        attention(*(tensor.to("meta") for tensor in dense()))
    assert reason in str(caught.value)
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "vendor")
    with pytest.raises(ConfigurationError, match="vendor is broken") as caught:
        attention(*dense())
    assert reason in str(caught.value)
    monkeypatch.delenv("HAL_ATTN_PLATFORM")
    doctor = run("doctor")
    assert doctor.exit_code == 1
    assert "vendor BROKEN broken plugin: " in words(doctor.stdout)
    assert reason in words(doctor.stdout)
    assert "the plugin vendor is broken" in words(doctor.stdout)
    assert "cpu_flash cpu usable" in words(doctor.stdout)


def test_the_plugin_that_the_broken_ones_are_made_of_is_right(monkeypatch):
    registry = beside_the_cpu(monkeypatch, Vendor)
    assert registry.broken == ()
    assert {status.name for status in platforms() if status.available} == {"vendor", "cpu"}
    assert {status.name for status in backends("meta")} == {"vendor_one", "vendor_two"}


class Anew(Vendor):
    """Makes other objects each time, against the contract."""

    def backends(self):
        return (backend(name="vendor_one", capabilities=Capabilities()),)


def test_backends_are_asked_for_once(monkeypatch):
    monkeypatch.setattr(Once, "asked", 0)
    beside_the_cpu(monkeypatch, Once)
    assert {status.platform for status in backends()} == {"vendor", "cpu"}
    with pytest.raises(UnsupportedAttentionError, match="tensors of cpu"):
        attention(*dense(), backend="vendor_one")
    assert attention(*dense()).shape == dense()[0].shape
    assert Once.asked == 1


def test_backends_made_anew_each_time_are_those_of_the_first(monkeypatch):
    registry = beside_the_cpu(monkeypatch, Anew)
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(*(tensor.to("meta") for tensor in dense()), backend="vendor_one")
    assert "dtype" in str(caught.value)
    assert "tensors of vendor" not in str(caught.value)
    vendor = registry.platform("vendor")
    assert registry.backends_of(vendor) is registry.backends_of(vendor)


@pytest.mark.parametrize("vendor_first", [True, False])
def test_it_breaks_nothing_wherever_it_stands(vendor_first, monkeypatch):
    sources = {"vendor": lambda: variant(backends=giving(GONE)), "cpu": lambda: CpuPlatform}
    order = sources if vendor_first else dict(reversed(sources.items()))
    install(monkeypatch, registry=Registry(order))
    assert attention(*dense()).shape == dense()[0].shape
