"""The AMD platform. This version detects it and has no backend for it yet."""

from __future__ import annotations

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.probing import DeviceKind, torch_build, torch_cuda_obstacle, versions_of
from hal_attn.request import AttentionRequest

LIBRARIES = ("amd-aiter", "flash-attn", "triton", "pytorch-triton-rocm")
INSTALL = (
    "on a machine with an AMD device, install PyTorch's ROCm build (pytorch.org/get-started lists the command), "
    "then pip install 'hal-attn[rocm]'"
)
DEVICES = DeviceKind(
    "AMD device",
    nodes=("kfd", "dxg"),
    visibility=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    check="`rocminfo` must list it, with a driver recent enough for the ROCm version of PyTorch",
)


class RocmPlatform(Platform):
    """AMD devices through a ROCm (HIP) build of PyTorch, which calls them "cuda" and drives them by `torch.cuda`."""

    name = "rocm"
    device_type = "cuda"
    # PyTorch's ROCm build has RCCL under the name of NCCL.
    process_group_backend = "nccl"

    def detect(self) -> Detection:
        """By the build of PyTorch first, then by `torch.cuda.device_count()`.

        That counts through AMD SMI where its Python package is installed, and asks the HIP runtime otherwise; neither
        initialises a device. `aiter` is not imported: without a working ROCm that raises, and with one it may compile.
        """
        versions = (("torch", torch.__version__), *versions_of(*LIBRARIES))
        if obstacle := _obstacle():
            return Detection(False, *obstacle, versions)
        return DEVICES.detect(f"{torch_build()} (ROCm {torch.version.hip})", torch.cuda.device_count, versions)

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Asks PyTorch for each device's properties, which initialises HIP in this process: fork before, not after."""
        return tuple(_device(index) for index in range(torch.cuda.device_count()))

    def backends(self) -> tuple[AttentionBackend, ...]:
        return ()

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return ()

    def owns(self, device: torch.device) -> bool:
        return device.type == "cuda" and torch.version.hip is not None


def _obstacle() -> tuple[str, str] | None:
    """(reason, remedy) why PyTorch cannot be asked for AMD devices."""
    if torch.version.hip is None:
        return f"{torch_build()} is built without ROCm", INSTALL
    return torch_cuda_obstacle()


def _device(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    # "gfx942:sramecc+:xnack-": the architecture, then its features.
    architecture = properties.gcnArchName.split(":")[0]
    return DeviceInfo(f"cuda:{index}", properties.name, architecture, properties.total_memory)
