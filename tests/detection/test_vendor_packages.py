"""Vendor packages that are missing, partial, broken or several: nothing breaks, and each platform says exactly why."""

from pathlib import Path

import pytest
import torch

PROBE = """
import json, sys, torch
torch.version.cuda = torch.version.hip = None
import hal_attn
modules = ("flash_attn", "flash_attn_interface", "aiter", "torch_npu", "triton")
imported = [name for name in modules if sys.modules.get(name)]
query = torch.ones(1, 4, 2, 8)
output = hal_attn.attention(query, query, query)
called = [name for name in modules if sys.modules.get(name)]
print(json.dumps({
    "imported": imported,
    "called": called,
    "right": bool(torch.allclose(output, query)),
    "platforms": {p.name: [p.available, p.reason, p.remedy, dict(p.versions)] for p in hal_attn.platforms()},
    "initialised": torch.cuda.is_initialized(),
    "npu": [d.architecture for p in hal_attn.platforms() if p.name == "ascend" for d in p.devices],
}))
"""

PYTORCH = f"PyTorch {torch.__version__}"
WORKING_NPU = """
import sys, types, torch
def properties(index):
    return types.SimpleNamespace(total_memory=64 << 30)
torch.npu = types.SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 2,
    get_device_name=lambda index: "Ascend910B1",
    get_device_properties=properties,
)
def _autoload():
    pass
"""
AUTOLOAD = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"


def probed(interpreter, before="", **variables):
    """The report of a fresh process that runs `before` first, after what holds whatever is installed."""
    report = interpreter(before + PROBE, **variables)
    assert report["right"]
    assert not report["initialised"]
    assert report["platforms"]["cpu"][0]
    for vendor, built in (("cuda", "CUDA"), ("rocm", "ROCm")):
        available, reason, remedy, _ = report["platforms"][vendor]
        assert (available, reason) == (False, f"{PYTORCH} is built without {built}")
        assert f"{built} build" in remedy
        assert f"hal-attn[{vendor}]" in remedy
    return report


def hide(*but):
    """Code that hides the vendors' packages `but` these, which the stubs are."""
    return f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from pytest import MonkeyPatch
from tests.absent import hide_vendor_packages
hide_vendor_packages(MonkeyPatch(), *{but!r})
"""


def broken(exception):
    return f"raise {exception}"


def test_without_vendor_packages(interpreter):
    report = probed(interpreter, before=hide())
    assert report["imported"] == report["called"] == []
    available, reason, remedy, versions = report["platforms"]["ascend"]
    assert (available, reason) == (False, "torch-npu is not installed")
    assert "hal-attn[ascend]" in remedy
    assert versions == {"torch": torch.__version__}


def test_flash_attention_4_alone_is_not_flash_attention_2(interpreter, stubs):
    stubs.module("flash_attn/cute/__init__.py", broken("ModuleNotFoundError(\"No module named 'cutlass'\")"))
    stubs.distribution("flash-attn-4", "4.0.0")
    report = probed(interpreter, before=hide("flash_attn", "flash-attn-4"))
    assert report["imported"] == report["called"] == []
    versions = report["platforms"]["cuda"][3]
    assert versions["flash-attn-4"] == "4.0.0"
    assert "flash-attn" not in versions


def test_packages_that_raise_at_import_are_listed_and_left_alone(interpreter, stubs):
    """One of each kind of exception; SystemExit would end the process."""
    stubs.module("aiter/__init__.py", broken("RuntimeError('ROCm version file not found')"))
    stubs.distribution("amd-aiter", "0.1.7.post2.dev18")
    stubs.module("flash_attn/__init__.py", broken("OSError('libcudart.so.12: cannot open shared object file')"))
    stubs.distribution("flash-attn", "2.8.3")
    stubs.module("flash_attn_interface.py", broken("AssertionError('Torch not compiled with CUDA enabled')"))
    stubs.distribution("fa3-fwd", "0.0.1")
    stubs.module("triton/__init__.py", broken("SystemExit('no compiler')"))
    stubs.distribution("triton", "3.7.0")
    report = probed(interpreter)
    assert report["imported"] == report["called"] == []
    cuda = {"torch": torch.__version__, "flash-attn": "2.8.3", "fa3-fwd": "0.0.1", "triton": "3.7.0"}
    assert report["platforms"]["cuda"][3].items() >= cuda.items()
    rocm = {"amd-aiter": "0.1.7.post2.dev18", "flash-attn": "2.8.3", "triton": "3.7.0"}
    assert report["platforms"]["rocm"][3].items() >= rocm.items()


def test_torch_npu_without_cann(interpreter, stubs):
    """As the real wheel fails: by the loader, after part of it is imported."""
    message = "libhccl.so: cannot open shared object file: No such file or directory"
    stubs.module("torch_npu/__init__.py", f"import torch_npu._init\n{broken(f'ImportError({message!r})')}")
    stubs.module("torch_npu/_init.py")
    stubs.distribution("torch-npu", "2.13.0", AUTOLOAD)
    report = probed(interpreter)
    assert report["imported"] == report["called"] == []
    available, reason, remedy, versions = report["platforms"]["ascend"]
    assert not available
    assert reason == f"torch-npu 2.13.0 cannot be imported beside {PYTORCH}: ImportError: {message}"
    assert "CANN" in remedy
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in remedy
    assert versions["torch-npu"] == "2.13.0"


def test_broken_torch_npu_stops_pytorch_itself_unless_autoload_is_off(interpreter, stubs):
    """Why the remedy names the variable: with it unset, PyTorch does not import, so nothing above PyTorch can."""
    stubs.module("torch_npu/__init__.py", broken("ImportError('libhccl.so')"))
    stubs.distribution("torch-npu", "2.13.0", AUTOLOAD)
    done = interpreter.start("import hal_attn", TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert done.returncode != 0
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr
    assert interpreter.start("import hal_attn").returncode == 0


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_working_torch_npu_is_found_with_and_without_autoload(interpreter, stubs, autoload):
    stubs.module("torch_npu/__init__.py", WORKING_NPU)
    stubs.distribution("torch-npu", "2.13.0", AUTOLOAD)
    report = probed(interpreter, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert report["imported"] == report["called"] == (["torch_npu"] if autoload == "1" else [])
    available, reason, remedy, _ = report["platforms"]["ascend"]
    assert (available, reason) == (True, f"2 Ascend NPUs through torch-npu 2.13.0 beside {PYTORCH}")
    assert remedy == ""
    assert report["npu"] == ["Ascend910B1", "Ascend910B1"]


def test_several_vendors_at_once_each_answer_for_themselves(interpreter, stubs):
    stubs.module("torch_npu/__init__.py", WORKING_NPU)
    stubs.distribution("torch-npu", "2.13.0")
    stubs.module("aiter/__init__.py", broken("RuntimeError('ROCm version file not found')"))
    stubs.distribution("amd-aiter", "0.1.7")
    stubs.module("flash_attn/__init__.py", broken("ImportError('flash_attn_2_cuda')"))
    stubs.distribution("flash-attn", "2.8.3")
    report = probed(interpreter)
    assert report["imported"] == report["called"] == []
    platforms = report["platforms"]
    assert [name for name in sorted(platforms) if platforms[name][0]] == ["ascend", "cpu"]
    assert platforms["rocm"][3]["amd-aiter"] == "0.1.7"
    assert platforms["cuda"][3]["flash-attn"] == platforms["rocm"][3]["flash-attn"] == "2.8.3"
