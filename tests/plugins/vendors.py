"""Plugins that are wrong in one way each, and what installs them beside the CPU's platform."""

from __future__ import annotations

from hal_attn_cpu.platform import CpuPlatform

from hal_attn.backend import AttentionBackend
from hal_attn.capabilities import Capabilities
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.registry import Registry
from tests.fakes import BatchedFake, install

GONE = RuntimeError("the driver is gone")
SHOWN = "RuntimeError: the driver is gone"


class Vendor(Platform):
    """A right platform for tensors on "meta", written as a stranger would; subclasses break one thing."""

    name = "vendor"
    api_version = 1
    device_type = "meta"
    process_group_backend = "gloo"

    def __init__(self) -> None:
        self.made = (BatchedFake("vendor_one"), BatchedFake("vendor_two"))

    def detect(self) -> Detection:
        return Detection(True, "one is here")

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo("meta", "Vendor One"),)

    def backends(self) -> tuple[AttentionBackend, ...]:
        return self.made

    def default_order(self, request):
        return ("vendor_two", "vendor_one")


class Once(Vendor):
    """Answers `backends()` the first time it is asked, and then no more."""

    asked = 0

    def backends(self):
        type(self).asked += 1
        if self.asked > 1:
            raise GONE
        return super().backends()


def variant(**changes: object) -> type[Vendor]:
    """A `Vendor` with these attributes in the place of its own."""
    return type("Variant", (Vendor,), changes)


def giving(result: object):
    """A method that returns `result` whatever it is asked, or raises it where it is an exception."""

    def method(self, *arguments):
        if isinstance(result, BaseException):
            raise result
        return result

    return method


def backend(**changes: object) -> AttentionBackend:
    """A backend of a stranger, with these class attributes."""
    body = {"name": "vendor_one", "capabilities": Capabilities(), "forward": lambda *given, **options: None, **changes}
    return type("Backend", (AttentionBackend,), {name: value for name, value in body.items() if value is not None})()


def beside_the_cpu(monkeypatch, vendor: object, name: str = "vendor") -> Registry:
    """The public functions see the CPU's platform and, before it, the plugin whose entry point gives `vendor`."""
    return install(monkeypatch, registry=Registry({name: lambda: vendor, "cpu": lambda: CpuPlatform}))
