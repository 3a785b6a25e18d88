"""The Ascend platform: finds its devices, and knows the backends that run on them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.probing import (
    DeviceKind,
    fork_obstacle,
    import_failure,
    is_findable,
    torch_build,
    version_of,
    versions_of,
)
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn_ascend.generations import Generation, generation_of

LIBRARIES = ("torch-npu", "flash-attn-npu", "triton-ascend")
INSTALL = (
    "on a machine with an Ascend NPU, install CANN, then pip install 'hal-attn[ascend]' "
    "(each torch-npu goes with one minor version of PyTorch)"
)
# PyTorch loads torch_npu by itself and fails with it, so the way out has to be said before anything can be mended.
REPAIR = (
    "install CANN and source its set_env.sh, with the torch-npu of PyTorch's minor version; until `import torch_npu` "
    "works, keep TORCH_DEVICE_BACKEND_AUTOLOAD=0 set, without which `import torch` itself fails; "
    "without an NPU: pip uninstall torch-npu"
)
DEVICES = DeviceKind(
    "Ascend NPU",
    nodes=("davinci[0-9]*",),
    # Read up to the first ID that is none (CANN 9.1.0, environment variables). An empty one, as Ray sets it for
    # processes without a device, makes torch.npu.is_available() false (ray-project/ray#59063).
    visibility=("ASCEND_RT_VISIBLE_DEVICES",),
    check="`npu-smi info` must list it, with a driver recent enough for the CANN version",
)


class AscendPlatform(Platform):
    """Ascend NPUs through torch_npu, whose tensors have the device type "npu".

    `torch.cuda` is never asked: torch_npu's transfer_to_npu makes it answer for NPUs.
    """

    name = "ascend"
    api_version = 1
    device_type = "npu"
    process_group_backend = "hccl"
    rejects_empty_sequences = True

    def detect(self) -> Detection:
        """By torch_npu, which PyTorch loads by itself, or which is imported here where that is switched off."""
        versions = (("torch", torch.__version__), *versions_of(*LIBRARIES))
        if obstacle := _obstacle():
            return Detection(False, *obstacle, versions)
        library, forked = f"{_torch_npu()} beside {torch_build()}", fork_obstacle(_npu(), "torch.npu")
        return DEVICES.detect(library, _count, versions, forked)

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Asks torch_npu for each device's properties, which initialises them here: fork before, not after."""
        return tuple(_device(index) for index in range(_npu().device_count()))

    def backends(self) -> tuple[AttentionBackend, ...]:
        return self._backends

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return ("ascend_fa", "ascend_pfa", "ascend_sdpa", "ascend_math")

    def order_source(self, request: AttentionRequest) -> str:
        return "not measured; the fused operators before PyTorch's"

    def runtime_versions(self, device: torch.device) -> tuple[tuple[str, str], ...]:
        """CANN and the driver, by torch_npu, which answers "" where it cannot tell (CANN before 8.1)."""
        version_of_part = _npu().utils.get_cann_version
        return tuple((name, str(version_of_part(part))) for name, part in (("CANN", "CANN"), ("driver", "DRIVER")))

    def validate(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        """NPUs multiply no float64 matrices, and 310P cards have no bfloat16."""
        if request.dtype == torch.float64:
            return (Refusal("dtype", "float64", "float32, bfloat16 or float16", "convert with tensor.float()"),)
        architecture = self.architecture(request.device)
        if request.dtype == torch.bfloat16 and generation_of(architecture) is Generation.INFERENCE_310P:
            return (Refusal("dtype", f"bfloat16 on {architecture}", "float16", "convert with tensor.half()"),)
        return ()

    def architecture(self, device: torch.device) -> str:
        """What torch_npu calls the device ("Ascend910B1"); asks it once for each device."""
        if device not in self._architectures:
            self._architectures[device] = str(_npu().get_device_name(device.index))
        return self._architectures[device]

    def simulation(self, generation: str | None) -> Platform | None:
        from hal_attn_ascend.simulation.platform import SimulatedAscend

        return SimulatedAscend.from_text(generation)

    def operators(self) -> Any:
        """The namespace of torch_npu's operators; ImportError without torch_npu."""
        from hal_attn_ascend.operators import torch_npu_operators

        return torch_npu_operators()

    @cached_property
    def _architectures(self) -> dict[torch.device, str]:
        return {}

    @cached_property
    def _backends(self) -> tuple[AttentionBackend, ...]:
        from hal_attn_ascend.fused import AscendFusedBackend
        from hal_attn_ascend.plain import AscendMathBackend, AscendSdpaBackend
        from hal_attn_ascend.prompt import AscendPromptBackend

        return (
            AscendFusedBackend(self.operators, self.architecture),
            AscendPromptBackend(self.operators, self.architecture),
            AscendSdpaBackend(),
            AscendMathBackend(),
        )


def _obstacle() -> tuple[str, str] | None:
    """(reason, remedy) why torch_npu cannot be asked for devices; None once `torch.npu` is there."""
    if not hasattr(torch, "npu"):
        if version_of("torch-npu") is None and not is_findable("torch_npu"):
            return "torch-npu is not installed", INSTALL
        failure = import_failure("torch_npu")
        if failure:
            return f"{_torch_npu()} cannot be imported beside {torch_build()}: {failure}", REPAIR
        if not hasattr(torch, "npu"):
            return f"{_torch_npu()} is incomplete: importing it brings no torch.npu", f"reinstall torch-npu: {INSTALL}"
    return None


def _count() -> int:
    return int(_npu().device_count()) if _npu().is_available() else 0


def _device(index: int) -> DeviceInfo:
    name = str(_npu().get_device_name(index))
    return DeviceInfo(f"npu:{index}", name, name, int(_npu().get_device_properties(index).total_memory))


def _npu() -> Any:
    """The namespace `torch.npu`, which torch_npu adds to PyTorch."""
    return getattr(torch, "npu")  # noqa: B009  (PyTorch's types do not know it)


def _torch_npu() -> str:
    return f"torch-npu {version_of('torch-npu') or 'without metadata'}"
