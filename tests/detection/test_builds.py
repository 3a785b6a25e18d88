"""Builds of PyTorch and what they see: the build decides the vendor, then its devices are counted."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hal_attn_ascend.platform import AscendPlatform
from hal_attn_cuda import platform as cuda
from hal_attn_cuda.platform import CudaPlatform
from hal_attn_rocm import platform as rocm
from hal_attn_rocm.platform import HIP_LISTS, RocmPlatform

from hal_attn import inventory
from hal_attn.platform import DeviceInfo
from hal_attn.registry import Registry
from hal_attn.settings import Settings

PYTORCH = f"PyTorch {torch.__version__}"
CUDA_DEVICE = torch.device("cuda", 0)
BUILDS = {"cuda": CudaPlatform, "hip": RocmPlatform}


@pytest.fixture(autouse=True)
def _build(cpu_build):
    """Each test starts from a CPU build."""


@pytest.fixture
def build(monkeypatch):
    """Make PyTorch a build for "cuda" or "hip" that counts `count` devices, or raises it."""

    def make(kind, version, count):
        def device_count():
            if isinstance(count, BaseException):
                raise count
            return count

        device_count.__module__ = "torch.cuda"
        monkeypatch.setattr(torch.version, kind, version)
        monkeypatch.setattr(torch.cuda, "device_count", device_count)

    return make


@pytest.fixture
def devices_in(monkeypatch, tmp_path):
    """An empty folder in the place of /dev."""
    for module in (cuda, rocm):
        monkeypatch.setattr(module, "DEVICES", replace(module.DEVICES, folder=tmp_path))
    return tmp_path


def registry():
    return Registry({"cuda": lambda: CudaPlatform, "rocm": lambda: RocmPlatform, "ascend": lambda: AscendPlatform})


def status(name):
    return next(found for found in inventory.platforms(registry()) if found.name == name)


def test_hip_build_is_amd(build, monkeypatch):
    build("hip", "6.4.43482", 1)
    properties = SimpleNamespace(
        name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", total_memory=192 << 30, major=9, minor=4
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = status("rocm")
    assert found.available
    assert found.reason == f"1 AMD device through {PYTORCH} (ROCm 6.4.43482)"
    assert found.devices == (DeviceInfo("cuda:0", "AMD Instinct MI300X", "gfx942", 192 << 30),)
    assert found.process_group_backend == "nccl"
    other = status("cuda")
    assert not other.available
    assert other.reason == f"{PYTORCH} is built for ROCm 6.4.43482, not for CUDA"
    assert registry().platform_for(CUDA_DEVICE, Settings()).name == "rocm"


def test_cuda_build_is_nvidia(build, monkeypatch):
    build("cuda", "12.8", 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="NVIDIA H200", total_memory=141 << 30)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    found = status("cuda")
    assert found.available
    assert found.reason == f"2 NVIDIA devices through {PYTORCH} (CUDA 12.8)"
    assert found.devices == tuple(DeviceInfo(f"cuda:{i}", "NVIDIA H200", "sm90", 141 << 30) for i in range(2))
    assert found.process_group_backend == "nccl"
    assert status("rocm").reason == f"{PYTORCH} is built without ROCm"
    assert registry().platform_for(CUDA_DEVICE, Settings()).name == "cuda"


@pytest.mark.parametrize(("hip", "owner"), [(None, "cuda"), ("6.4", "rocm")])
def test_the_build_decides_whose_cuda_tensors_are(monkeypatch, hip, owner):
    """With no vendor's device here, and with `is_available` answering for another vendor's."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    owners = [platform.name for platform in registry().platforms if platform.owns(CUDA_DEVICE)]
    assert owners == [owner]
    assert not any(platform.owns(torch.device("cpu")) for platform in registry().platforms)


def test_ascend_owns_npu_tensors_alone():
    owned = SimpleNamespace(type="npu")
    assert [platform.name for platform in registry().platforms if platform.owns(owned)] == ["ascend"]


def test_facts_of_ascend():
    assert AscendPlatform.process_group_backend == "hccl"
    assert AscendPlatform.rejects_empty_sequences


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize(
    "error", [RuntimeError("driver"), OSError("driver"), AssertionError("driver"), SystemExit("driver")]
)
def test_counting_that_raises_is_the_reason(build, kind, error):
    build(kind, "9.9", error)
    found = BUILDS[kind]().detect()
    assert not found.available
    assert found.reason.endswith(f"devices: {type(error).__name__}: driver")
    assert found.remedy


@pytest.mark.parametrize("kind", BUILDS)
def test_no_device(build, devices_in, kind):
    build(kind, "9.9", 0)
    found = BUILDS[kind]().detect()
    assert not found.available
    assert "sees no" in found.reason
    assert f"there is no {devices_in}" in found.reason
    assert "device files" in found.remedy


@pytest.mark.parametrize(("kind", "node", "tool"), [("cuda", "nvidia0", "nvidia-smi"), ("hip", "kfd", "rocminfo")])
def test_device_that_the_driver_does_not_show(build, devices_in, monkeypatch, kind, node, tool):
    (devices_in / node).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0")
    build(kind, "9.9", 0)
    found = BUILDS[kind]().detect()
    assert found.reason.endswith(f"though {devices_in / node} is here")
    assert tool in found.remedy
    assert "CUDA_VISIBLE_DEVICES='GPU-0'" in found.remedy


@pytest.mark.parametrize(("kind", "node"), [("cuda", "nvidia0"), ("hip", "kfd")])
def test_device_without_permission(build, devices_in, monkeypatch, kind, node):
    (devices_in / node).touch()
    monkeypatch.setattr("os.access", lambda *_: False)
    build(kind, "9.9", 0)
    found = BUILDS[kind]().detect()
    assert found.reason.endswith(f"no permission to open {devices_in / node}")
    assert "group" in found.remedy


# HIP takes an empty list of its own for none given.
HIDING = [
    *(("cuda", "CUDA_VISIBLE_DEVICES", value) for value in ("", "-1", " ")),
    *(("hip", "ROCR_VISIBLE_DEVICES", value) for value in ("", "-1", " ")),
    *(("hip", variable, value) for variable in HIP_LISTS for value in ("-1", " ")),
]


@pytest.mark.parametrize(("kind", "variable", "value"), HIDING)
def test_devices_hidden_by_a_variable(build, monkeypatch, kind, variable, value):
    monkeypatch.setenv(variable, value)
    build(kind, "9.9", 0)
    found = BUILDS[kind]().detect()
    assert f"{variable}={value!r} hides every" in found.reason
    assert found.remedy == f"unset {variable}"


@pytest.mark.parametrize("variable", HIP_LISTS)
def test_an_empty_list_of_hip_hides_nothing(build, monkeypatch, variable):
    """PyTorch counts none by such a list, until HIP is initialised, which shows all."""
    monkeypatch.setenv(variable, "")
    build("hip", "9.9", 0)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 8, raising=False)
    found = RocmPlatform().detect()
    assert found.available
    assert found.reason.startswith("8 AMD devices through ")


@pytest.mark.parametrize("variable", HIP_LISTS)
def test_an_empty_list_of_hip_is_no_reason_where_no_device_is(build, devices_in, monkeypatch, variable):
    monkeypatch.setenv(variable, "")
    build("hip", "9.9", 0)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 0, raising=False)
    assert f"there is no {devices_in}" in RocmPlatform().detect().reason
    (devices_in / "kfd").touch()
    assert variable not in RocmPlatform().detect().remedy


def test_an_empty_list_of_hip_gives_way_to_that_of_cuda(build, monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    build("hip", "9.9", 0)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 0, raising=False)
    assert RocmPlatform().detect().reason.startswith("CUDA_VISIBLE_DEVICES='-1' hides every")


@pytest.mark.parametrize("kind", BUILDS)
def test_after_a_fork_of_a_process_that_used_the_device(build, monkeypatch, kind):
    build(kind, "9.9", 1)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    found = BUILDS[kind]().detect()
    assert not found.available
    assert found.reason == "this process was forked after its parent had initialised torch.cuda"
    assert "'spawn'" in found.remedy


@pytest.mark.parametrize(("kind", "node"), [("cuda", "nvidia0"), ("hip", "kfd")])
def test_after_such_a_fork_no_runtime_is_asked_about_a_device_that_is_here(build, devices_in, monkeypatch, kind, node):
    (devices_in / node).touch()
    build(kind, "9.9", AssertionError("the runtime was asked"))
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert BUILDS[kind]().detect().reason == "this process was forked after its parent had initialised torch.cuda"


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(("kind", "node"), [("cuda", "nvidia0"), ("hip", "kfd")])
def test_after_a_fork_of_a_process_that_found_no_device(build, devices_in, monkeypatch, kind, node, hidden):
    """`torch.cuda.is_available()` is enough for PyTorch to call the fork bad; the reason is the parent's."""
    build(kind, "9.9", 0)
    if hidden:
        (devices_in / node).touch()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    parents = BUILDS[kind]().detect()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert BUILDS[kind]().detect() == parents
    assert ("hides every" if hidden else "there is no") in parents.reason


@pytest.mark.parametrize("kind", BUILDS)
def test_torch_cuda_that_answers_for_another_vendor(build, monkeypatch, kind):
    """What torch_npu's transfer_to_npu does: its own functions in torch.cuda."""
    build(kind, "9.9", 8)
    torch.cuda.device_count.__module__ = "torch_npu.npu"
    monkeypatch.setattr("hal_attn.probing.metadata.entry_points", lambda group: [SimpleNamespace(name="torch_npu")])
    found = BUILDS[kind]().detect()
    assert not found.available
    assert found.reason == "torch.cuda is redirected to torch_npu"
    assert found.remedy
