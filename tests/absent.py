"""A machine without any vendor's package, whatever is installed on the one that runs the tests."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

MODULES = (
    "aiter",
    "fa3_fwd_config",
    "fa3_fwd_interface",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_config",
    "flash_attn_interface",
    "flashinfer",
    "torch_npu",
)
DISTRIBUTIONS = (
    "amd-aiter",
    "fa3-fwd",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "torch-npu",
)


def hide_vendor_packages(monkeypatch: pytest.MonkeyPatch, *but: str) -> None:
    """Let no vendor's module be imported and no vendor's distribution be found, `but` these, until the test ends."""
    for name in MODULES:
        if name not in but:
            monkeypatch.setitem(sys.modules, name, None)
    version = metadata.version

    def without(distribution: str) -> str:
        if distribution in DISTRIBUTIONS and distribution not in but:
            raise metadata.PackageNotFoundError(distribution)
        return version(distribution)

    monkeypatch.setattr(metadata, "version", without)
