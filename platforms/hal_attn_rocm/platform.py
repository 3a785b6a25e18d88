"""The AMD platform: finds its devices, knows their generations, and orders its backends by them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from platform import release
from typing import Any

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.probing import DeviceKind, fork_obstacle, line_of, torch_build, torch_cuda_obstacle, versions_of
from hal_attn.request import AttentionRequest

LIBRARIES = ("amd-aiter", "flash-attn", "triton", "pytorch-triton-rocm")
INSTALL = (
    "on a machine with an AMD device, install PyTorch's ROCm build (pytorch.org/get-started lists the command), "
    "then pip install 'hal-attn[rocm]'"
)
# HIP reads HIP_VISIBLE_DEVICES, then CUDA_VISIBLE_DEVICES, and takes an empty one for none given (ROCm/clr,
# rocclr/device/rocm/rocdevice.cpp, `ordinals`; ROCm/hip#3001). An empty ROCR_VISIBLE_DEVICES hides all
# (ROCm/ROCR-Runtime, core/runtime/amd_filter_device.cpp, `SelectZeroDevices`).
HIP_LISTS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
DEVICES = DeviceKind(
    "AMD device",
    nodes=("kfd", "dxg"),
    visibility=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    check="`rocminfo` must list it, with a driver recent enough for the ROCm version of PyTorch",
    unset_when_empty=HIP_LISTS,
)

# By the start of the generation's name; the order of the last is that of all others.
ORDERS = {
    "gfx942": ("aiter", "flash_attn", "aiter_triton", "torch_flash", "torch_efficient", "torch_math"),
    "gfx950": ("aiter", "flash_attn", "aiter_triton", "torch_flash", "torch_efficient", "torch_math"),
    "gfx9": ("flash_attn", "aiter", "torch_flash", "torch_efficient", "torch_math", "aiter_triton"),
    "": ("flash_attn", "torch_flash", "torch_efficient", "torch_math", "aiter", "aiter_triton"),
}
DRIVER = Path("/sys/module/amdgpu/version")


class RocmPlatform(Platform):
    """AMD devices through a ROCm (HIP) build of PyTorch, which calls them "cuda" and drives them by `torch.cuda`."""

    name = "rocm"
    api_version = 1
    device_type = "cuda"
    # PyTorch's ROCm build has RCCL under the name of NCCL.
    process_group_backend = "nccl"

    def detect(self) -> Detection:
        """By the build of PyTorch first, then by its count of devices.

        PyTorch counts through AMD SMI where its Python package is installed, and asks the HIP runtime otherwise;
        neither initialises a device. `aiter` is not imported: without a working ROCm that raises, and with one it may
        compile.
        """
        versions = (("torch", torch.__version__), *versions_of(*LIBRARIES))
        if obstacle := _obstacle():
            return Detection(False, *obstacle, versions)
        library, forked = f"{torch_build()} (ROCm {torch.version.hip})", fork_obstacle(torch.cuda, "torch.cuda")
        return DEVICES.detect(library, _count, versions, forked)

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Asks PyTorch for each device's properties, which initialises HIP in this process: fork before, not after."""
        return tuple(_device(index) for index in range(_count()))

    def backends(self) -> tuple[AttentionBackend, ...]:
        return self._backends

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        """AITER first where it has assembly, FlashAttention over CK on other CDNA devices, and elsewhere what runs over
        Triton; a library without kernels for the generation comes after `torch_math`, which takes everything."""
        architecture = self.architecture(request.device)
        return next(order for start, order in ORDERS.items() if architecture.startswith(start))

    def order_source(self, request: AttentionRequest) -> str:
        return "not measured; AITER first where it has assembly"

    def runtime_versions(self, device: torch.device) -> tuple[tuple[str, str], ...]:
        """The ROCm that PyTorch was built with, and the driver: amdgpu's own version, or else the kernel's."""
        driver = line_of(DRIVER)
        return (("ROCm", str(torch.version.hip)), ("driver", release() if driver == "unknown" else driver))

    def architecture(self, device: torch.device) -> str:
        """The generation of a device of this platform, "gfx942"; initialises HIP."""
        return _architecture(torch.cuda.get_device_properties(device))

    def libraries(self) -> Mapping[str, Callable[[], Any]]:
        """By name, what imports each library."""
        from hal_attn.portable.flash_attn import import_flash_attn

        return {
            "aiter": partial(import_module, "aiter"),
            "aiter_triton": partial(import_module, "aiter.ops.triton.mha"),
            "flash_attn": import_flash_attn,
            "aten": lambda: torch.ops.aten,
        }

    def flash_over_triton(self) -> bool:
        """Whether flash-attn runs over Triton; over Composable Kernel otherwise."""
        from hal_attn_rocm.flash_attn import flash_attn_uses_triton

        return flash_attn_uses_triton()

    def simulation(self, generation: str | None) -> Platform | None:
        from hal_attn_rocm.simulated.platform import simulated_rocm

        return simulated_rocm(generation)

    @cached_property
    def _backends(self) -> tuple[AttentionBackend, ...]:
        from hal_attn.portable.math import MathBackend
        from hal_attn_rocm.aiter import AiterBackend
        from hal_attn_rocm.aiter_triton import AiterTritonBackend
        from hal_attn_rocm.aotriton import RocmTorchEfficientBackend, RocmTorchFlashBackend
        from hal_attn_rocm.flash_attn import RocmFlashAttentionBackend

        libraries = self.libraries()
        return (
            AiterBackend(libraries["aiter"], self.architecture),
            RocmFlashAttentionBackend(libraries["flash_attn"], self.architecture, self.flash_over_triton),
            AiterTritonBackend(libraries["aiter_triton"], self.architecture),
            RocmTorchFlashBackend(libraries["aten"], self.architecture),
            RocmTorchEfficientBackend(libraries["aten"], self.architecture),
            MathBackend(),
        )

    def owns(self, device: torch.device) -> bool:
        return device.type == "cuda" and torch.version.hip is not None


def _count() -> int:
    """How many devices HIP shows.

    PyTorch reads the lists itself until HIP is initialised, and takes an empty one for no device, where HIP shows them
    all; then HIP is asked, as PyTorch does later.
    """
    counted = torch.cuda.device_count()
    if counted or all(os.environ.get(name) != "" for name in HIP_LISTS):
        return counted
    return torch._C._cuda_getDeviceCount()


def _obstacle() -> tuple[str, str] | None:
    """(reason, remedy) why PyTorch cannot be asked for AMD devices."""
    if torch.version.hip is None:
        return f"{torch_build()} is built without ROCm", INSTALL
    return torch_cuda_obstacle()


def _architecture(properties: Any) -> str:
    # "gfx942:sramecc+:xnack-": the architecture, then its features.
    name: str = properties.gcnArchName
    return name.split(":")[0]


def _device(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    return DeviceInfo(f"cuda:{index}", properties.name, _architecture(properties), properties.total_memory)
