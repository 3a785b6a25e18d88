"""The AMD platform: its orders, its devices, what its simulation may be asked for; it imports nothing early."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hal_attn_rocm.flash_attn import flash_attn_uses_triton
from hal_attn_rocm.platform import RocmPlatform

from hal_attn import ConfigurationError, attention
from hal_attn.registry import default_registry
from tests.absent import hide_vendor_packages
from tests.support import dense


@pytest.mark.parametrize(
    ("generation", "order"),
    [
        ("gfx942", "aiter flash_attn aiter_triton torch_flash torch_efficient torch_math"),
        ("gfx950", "aiter flash_attn aiter_triton torch_flash torch_efficient torch_math"),
        ("gfx90a", "flash_attn aiter torch_flash torch_efficient torch_math aiter_triton"),
        ("gfx908", "flash_attn aiter torch_flash torch_efficient torch_math aiter_triton"),
        ("gfx1100", "flash_attn torch_flash torch_efficient torch_math aiter aiter_triton"),
        ("gfx1201", "flash_attn torch_flash torch_efficient torch_math aiter aiter_triton"),
    ],
)
def test_order_by_generation(monkeypatch, generation, order):
    platform = RocmPlatform()
    properties = SimpleNamespace(gcnArchName=f"{generation}:sramecc+:xnack-", name="AMD Instinct", total_memory=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    request = SimpleNamespace(device=torch.device("cuda:0"))
    assert platform.architecture(request.device) == generation
    assert platform.default_order(request) == tuple(order.split())
    assert {backend.name for backend in platform.backends()} == set(order.split())
    assert platform.devices()[0].architecture == generation


def test_backends_are_the_same_objects_each_time():
    platform = RocmPlatform()
    assert platform.backends() is platform.backends()


def test_nothing_of_a_vendor_is_imported_until_it_is_used():
    code = (
        "import sys; from hal_attn_rocm.platform import RocmPlatform; RocmPlatform().backends();"
        "print([name for name in sys.modules if name.partition('.')[0] in ('aiter', 'flash_attn', 'triton')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_missing_libraries_say_how_to_get_them(monkeypatch):
    hide_vendor_packages(monkeypatch)
    reasons = {backend.name: backend.unavailable() for backend in RocmPlatform().backends()}
    assert "amd-aiter is not installed" in str(reasons["aiter"])
    assert "amd-aiter is not installed" in str(reasons["aiter_triton"])
    assert reasons["torch_math"] is None


def test_simulation_says_that_it_is_one(simulate):
    platform = simulate("gfx950,empty_lse=nan,flash_attn=triton")
    assert platform.simulated
    assert "SIMULATED gfx950, empty_lse=nan, flash_attn=triton" in platform.detect().reason
    assert platform.devices()[0].architecture == "gfx950"
    assert attention(*dense(dtype=torch.float16)).device.type == "cpu"


@pytest.mark.parametrize("device", ["gfx000", "gfx942,flash_attn=cutlass", "gfx942,aiter=0.2"])
def test_simulation_of_what_there_is_not(device):
    with pytest.raises(ConfigurationError, match="gfx942"):
        default_registry().simulation(f"rocm:{device}")


def test_gfx1100_runs_flash_attn_over_triton(simulate):
    assert simulate("gfx1100").flash_over_triton()
    assert not simulate("gfx90a").flash_over_triton()


def test_the_switch_of_flash_attn_is_read_when_asked_until_the_library_has_settled_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_attn.flash_attn_interface", raising=False)
    monkeypatch.delenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", raising=False)
    platform = RocmPlatform()
    assert not platform.flash_over_triton()
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    assert platform.flash_over_triton()
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", SimpleNamespace(USE_TRITON_ROCM=False))
    assert not flash_attn_uses_triton()
