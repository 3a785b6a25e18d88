"""The NVIDIA platform: its devices, its backends and their order."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.portable.generation import compute_capability
from hal_attn.probing import DeviceKind, fork_obstacle, line_of, torch_build, torch_cuda_obstacle, versions_of
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn_cuda.backends import INSTALLED, make_backends
from hal_attn_cuda.order import default_order, row_for

LIBRARIES = (
    "flash-attn",
    "fa3-fwd",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "triton",
)
INSTALL = (
    "on a machine with an NVIDIA device, install PyTorch's CUDA build (pytorch.org/get-started lists the command; "
    "on Linux x86-64 it is what `pip install torch` brings), then pip install 'hal-attn[cuda]'"
)
DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = DeviceKind(
    "NVIDIA device",
    # Discrete GPUs; the integrated ones of Jetson; WSL.
    nodes=("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "dxg"),
    # An empty one hides all (CUDA Programming Guide 13, 5.2.1.1).
    visibility=("CUDA_VISIBLE_DEVICES",),
    check="`nvidia-smi` must list it, with a driver recent enough for the CUDA version of PyTorch",
)


class CudaPlatform(Platform):
    """NVIDIA devices through a CUDA build of PyTorch.

    A "cuda" tensor is NVIDIA's unless PyTorch is a HIP build: AMD's tensors carry the same device type.
    """

    name = "cuda"
    api_version = 1
    device_type = "cuda"
    process_group_backend = "nccl"

    def __init__(self) -> None:
        self._architectures: dict[int, str] = {}

    def detect(self) -> Detection:
        """By the build of PyTorch first, then by `torch.cuda.device_count()`.

        That counts through NVML, which leaves CUDA uninitialised and a later fork safe. Only where NVML does not answer
        does it ask the CUDA runtime, which initialises no device either, but makes PyTorch give a later fork no device;
        `torch.cuda.is_available()` asks it always.
        """
        versions = (("torch", torch.__version__), *versions_of(*LIBRARIES))
        if obstacle := _obstacle():
            return Detection(False, *obstacle, versions)
        library, forked = f"{torch_build()} (CUDA {torch.version.cuda})", fork_obstacle(torch.cuda, "torch.cuda")
        return DEVICES.detect(library, torch.cuda.device_count, versions, forked)

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Asks PyTorch for each device's properties, which initialises CUDA in this process: fork before, not after."""
        return tuple(_device(index) for index in range(torch.cuda.device_count()))

    def backends(self) -> tuple[AttentionBackend, ...]:
        return self._backends

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return default_order(request, self.architecture(request.device))

    def order_source(self, request: AttentionRequest) -> str:
        return row_for(request, self.architecture(request.device)).source

    def runtime_versions(self, device: torch.device) -> tuple[tuple[str, str], ...]:
        """The CUDA that PyTorch was built with, the cuDNN that it loads, and the driver."""
        cudnn = str(torch.backends.cudnn.version())
        return (("CUDA", str(torch.version.cuda)), ("cuDNN", cudnn), ("driver", line_of(DRIVER)))

    def validate(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        """A device that is older than all that this PyTorch was built for runs no kernel at all."""
        capability = compute_capability(self.architecture(request.device))
        built = [found for name in torch.cuda.get_arch_list() if (found := compute_capability(name.replace("_", "")))]
        if capability is None or not built or capability >= min(built):
            return ()
        need = f"sm{min(built)} or later, the oldest that {torch_build()} is built for"
        return (Refusal("device", f"sm{capability}", need, "install a build of PyTorch for it"),)

    def architecture(self, device: torch.device) -> str:
        """The generation of a device, as "sm90". The first look at a device initialises CUDA."""
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._architectures:
            self._architectures[index] = _generation(index)
        return self._architectures[index]

    def simulation(self, generation: str | None) -> Platform | None:
        from hal_attn_cuda.simulated.platform import SimulatedCuda

        return SimulatedCuda.parse(generation)

    @cached_property
    def _backends(self) -> tuple[AttentionBackend, ...]:
        return make_backends(INSTALLED, self.architecture)

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
    return DeviceInfo(f"cuda:{index}", properties.name, _generation(index), properties.total_memory)


def _generation(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm{major}{minor}"
