"""The conformance kit over a plugin that is wrong: reported by name, and the others are checked all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hal_attn_cpu.math import CpuMathBackend
from hal_attn_cpu.platform import CpuPlatform

from hal_attn import testing
from hal_attn.registry import Registry
from hal_attn.testing import verification
from tests.fakes import FakePlatform, fresh  # noqa: F401
from tests.plugins.vendors import GONE, SHOWN, Once, giving

CLAIMS = replace(CpuMathBackend.capabilities, dtypes=frozenset({torch.float32}))


class Overclaims(CpuMathBackend):
    """Claims the window, and computes without it."""

    name = "vendor_kernel"
    capabilities = CLAIMS

    def forward(self, query, key, value, *, window_size=None, **options):
        return super().forward(query, key, value, **options)


class Small(CpuPlatform):
    """The CPU's platform with one backend, so that a run is short."""

    def backends(self):
        return super().backends()[:1]


def verified(monkeypatch, vendor, platform=None):
    registry = Registry({"vendor": lambda: vendor, "cpu": lambda: Small})
    assert registry.broken == ()
    monkeypatch.setattr(verification, "default_registry", lambda: registry)
    return testing.verify(platform)


def test_claims_that_are_not_kept_are_named(monkeypatch):
    class Vendor(FakePlatform):
        def __init__(self):
            super().__init__("vendor", Overclaims())

    report = verified(monkeypatch, Vendor, "vendor")
    assert not report.ok
    failed = {check.feature for check in report.checks if check.status == "failed"}
    assert "window" in failed
    assert {check.backend for check in report.checks if check.status == "failed"} == {"vendor_kernel"}


class DevicesRaise(FakePlatform):
    devices = giving(GONE)

    def __init__(self):
        super().__init__("vendor", CpuMathBackend())


@pytest.mark.parametrize(("vendor", "reason"), [(DevicesRaise, SHOWN), (Once, SHOWN)])
def test_the_others_are_checked_beside_one_that_raises(vendor, reason, monkeypatch):
    monkeypatch.setattr(Once, "asked", 0)
    report = verified(monkeypatch, vendor)
    (cpu,) = (backend for backend in report.backends if backend.platform == "cpu")
    assert cpu.ok
    assert any(check.status == "passed" for check in cpu.checks)
    (found,) = (platform for platform in report.platforms if platform.name == "vendor")
    assert not found.available or any(check.status == "failed" for check in found.checks)
    assert reason in found.reason or any(reason in check.message for check in found.checks)
