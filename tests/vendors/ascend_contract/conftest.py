"""These tests are collected by the contract run alone, which must have torch_npu: there they fail, never skip."""

import os

import pytest

# Set by `ci/ascend_contract/environment.py run`.
CONTRACT = "ASCEND_CONTRACT" in os.environ
collect_ignore_glob = [] if CONTRACT else ["test_*.py"]


@pytest.fixture
def library():
    """Registrations for the npu operators that end with the test."""
    import torch

    with torch.library._scoped_library("npu", "IMPL") as scoped:
        yield scoped


@pytest.fixture
def no_device(monkeypatch):
    """Let meta kernels ask for the device generation without initialising a device, of which there is none."""
    import torch_npu

    monkeypatch.setattr(torch_npu.npu, "_lazy_init", lambda: None)
