"""The NVIDIA platform. This version detects it and has no backend for it yet."""

from __future__ import annotations

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.probing import DeviceKind, torch_build, torch_cuda_obstacle, versions_of
from hal_attn.request import AttentionRequest

LIBRARIES = (
    "flash-attn",
    "fa3-fwd",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cudnn-cu12",
    "triton",
)
INSTALL = (
    "on a machine with an NVIDIA device, install PyTorch's CUDA build (pytorch.org/get-started lists the command; "
    "on Linux x86-64 it is what `pip install torch` brings), then pip install 'hal-attn[cuda]'"
)
DEVICES = DeviceKind(
    "NVIDIA device",
    # Discrete GPUs; the integrated ones of Jetson; WSL.
    nodes=("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "dxg"),
    visibility=("CUDA_VISIBLE_DEVICES",),
    check="`nvidia-smi` must list it, with a driver recent enough for the CUDA version of PyTorch",
)


class CudaPlatform(Platform):
    """NVIDIA devices through a CUDA build of PyTorch.

    A "cuda" tensor is NVIDIA's unless PyTorch is a HIP build: AMD's tensors carry the same device type.
    """

    name = "cuda"
    device_type = "cuda"
    process_group_backend = "nccl"

    def detect(self) -> Detection:
        """By the build of PyTorch first, then by `torch.cuda.device_count()`.

        That counts through NVML, which leaves CUDA uninitialised and a later fork safe. Only where NVML does not answer
        does it ask the CUDA runtime, which initialises no device either; `torch.cuda.is_available()` asks it always.
        """
        versions = (("torch", torch.__version__), *versions_of(*LIBRARIES))
        if obstacle := _obstacle():
            return Detection(False, *obstacle, versions)
        return DEVICES.detect(f"{torch_build()} (CUDA {torch.version.cuda})", torch.cuda.device_count, versions)

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Asks PyTorch for each device's properties, which initialises CUDA in this process: fork before, not after."""
        return tuple(_device(index) for index in range(torch.cuda.device_count()))

    def backends(self) -> tuple[AttentionBackend, ...]:
        return ()

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return ()

    def owns(self, device: torch.device) -> bool:
        return device.type == "cuda" and torch.version.hip is None


def _obstacle() -> tuple[str, str] | None:
    """(reason, remedy) why PyTorch cannot be asked for NVIDIA devices."""
    if torch.version.hip is not None:
        return f"{torch_build()} is built for ROCm {torch.version.hip}, not for CUDA", INSTALL
    if torch.version.cuda is None:
        return f"{torch_build()} is built without CUDA", INSTALL
    return torch_cuda_obstacle()


def _device(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    major, minor = torch.cuda.get_device_capability(index)
    return DeviceInfo(f"cuda:{index}", properties.name, f"sm{major}{minor}", properties.total_memory)
