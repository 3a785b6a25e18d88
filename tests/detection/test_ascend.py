"""torch_npu in every state that it can be found in."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hal_attn_ascend import platform as ascend
from hal_attn_ascend.platform import AscendPlatform

from hal_attn import inventory
from hal_attn.platform import DeviceInfo
from hal_attn.registry import Registry

PYTORCH = f"PyTorch {torch.__version__}"


@pytest.fixture(autouse=True)
def _no_torch_npu(cpu_build, monkeypatch, tmp_path):
    """Each test starts without torch_npu, with the stubs in front and an empty folder in the place of /dev."""
    monkeypatch.delattr(torch, "npu", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_npu"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "dev"
    folder.mkdir()
    monkeypatch.setattr(ascend, "DEVICES", replace(ascend.DEVICES, folder=folder))
    yield
    sys.modules.pop("torch_npu", None)


@pytest.fixture
def npu(stubs, monkeypatch):
    """Install a `torch.npu` with two devices, as torch-npu 2.13.0; keywords replace its functions."""

    def install(**functions):
        stubs.distribution("torch-npu", "2.13.0")
        runtime = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "get_device_name": lambda index: "Ascend910_9391",
            "get_device_properties": lambda index: SimpleNamespace(total_memory=64 << 30),
            "_is_in_bad_fork": lambda: False,
            **functions,
        }
        monkeypatch.setattr(torch, "npu", SimpleNamespace(**runtime), raising=False)

    return install


def status():
    (found,) = inventory.platforms(Registry({"ascend": lambda: AscendPlatform}))
    return found


def raising(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libhccl.so: cannot open')", "ImportError: libhccl.so: cannot open"),
        ("raise RuntimeError('Two accelerators\\ncannot be used')", "RuntimeError: Two accelerators cannot be used"),
        ("raise OSError('libascendcl.so')", "OSError: libascendcl.so"),
        ("assert False, 'no CANN'", "AssertionError: no CANN"),
        ("import sys; sys.exit('no CANN')", "SystemExit: no CANN"),
        ("class Panic(BaseException): pass\nraise Panic('no CANN')", "Panic: no CANN"),
        ("import torch_npu_C", "ModuleNotFoundError: No module named 'torch_npu_C'"),
        ("def broken(:", "SyntaxError: invalid syntax (__init__.py, line 1)"),
    ],
)
def test_import_that_raises_is_the_reason(stubs, source, reason):
    stubs.distribution("torch-npu", "2.13.0")
    stubs.module("torch_npu/__init__.py", source)
    found = status()
    assert not found.available
    assert found.reason == f"torch-npu 2.13.0 cannot be imported beside {PYTORCH}: {reason}"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.remedy


def test_the_users_interrupt_passes(stubs):
    stubs.distribution("torch-npu", "2.13.0")
    stubs.module("torch_npu/__init__.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        status()


def test_what_an_uninstall_leaves_behind(stubs):
    """A folder of leftovers imports as a namespace package."""
    stubs.module("torch_npu/lib/leftover.txt")
    found = status()
    assert not found.available
    assert found.reason == "torch-npu without metadata is incomplete: importing it brings no torch.npu"
    assert "reinstall" in found.remedy


def test_metadata_without_the_package(stubs):
    stubs.distribution("torch-npu", "2.13.0")
    assert "ModuleNotFoundError: No module named 'torch_npu'" in status().reason


def test_devices(npu):
    npu()
    found = status()
    assert found.available
    assert found.reason == f"2 Ascend NPUs through torch-npu 2.13.0 beside {PYTORCH}"
    assert found.devices[1] == DeviceInfo("npu:1", "Ascend910_9391", "Ascend910_9391", 64 << 30)
    assert found.process_group_backend == "hccl"
    assert dict(found.versions)["torch-npu"] == "2.13.0"


@pytest.mark.parametrize("function", ["is_available", "device_count"])
@pytest.mark.parametrize("error", [RuntimeError("acl"), OSError("acl"), AssertionError("acl"), SystemExit("acl")])
def test_asking_that_raises_is_the_reason(npu, function, error):
    npu(**{function: raising(error)})
    found = status()
    assert not found.available
    expected = f"torch-npu 2.13.0 beside {PYTORCH} cannot count Ascend NPUs: {type(error).__name__}: acl"
    assert found.reason == expected
    assert "npu-smi" in found.remedy


def test_properties_that_raise_make_it_unavailable(npu):
    npu(get_device_properties=raising(RuntimeError("ERR02200 DIST")))
    found = status()
    assert not found.available
    assert found.reason == "its devices cannot be listed: RuntimeError: ERR02200 DIST"


def test_no_device(npu, tmp_path):
    npu(is_available=lambda: False)
    found = status()
    assert not found.available
    assert found.reason.endswith(f"sees no Ascend NPU, and there is no {tmp_path / 'dev'}/davinci[0-9]*")


def test_device_that_the_driver_does_not_show(npu, tmp_path):
    npu(is_available=lambda: False)
    (tmp_path / "dev" / "davinci0").touch()
    found = status()
    assert found.reason.endswith(f"sees no Ascend NPU, though {tmp_path / 'dev' / 'davinci0'} is here")
    assert "npu-smi" in found.remedy


def test_devices_hidden_by_a_variable(npu, monkeypatch):
    npu(is_available=lambda: False)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    found = status()
    assert found.reason == "ASCEND_RT_VISIBLE_DEVICES='' hides every Ascend NPU"
    assert found.remedy == "unset ASCEND_RT_VISIBLE_DEVICES"


def test_after_a_fork_of_a_process_that_found_no_device(npu):
    npu(is_available=lambda: False, _is_in_bad_fork=lambda: True)
    assert "sees no Ascend NPU, and there is no" in status().reason


def test_after_a_fork_of_a_process_that_used_the_device(npu):
    npu(_is_in_bad_fork=lambda: True)
    found = status()
    assert not found.available
    assert found.reason == "this process was forked after its parent had initialised torch.npu"
    assert "'spawn'" in found.remedy
