"""The CPU platform: always there, the default of an embedded user and of every test."""

from __future__ import annotations

import platform as machine
from functools import cached_property
from pathlib import Path

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.probing import line_of
from hal_attn.request import AttentionRequest


class CpuPlatform(Platform):
    """The CPU through PyTorch. Every option of every call is answered: what no kernel takes, `cpu_math` does."""

    name = "cpu"
    api_version = 1
    device_type = "cpu"
    process_group_backend = "gloo"

    def detect(self) -> Detection:
        return Detection(
            True,
            f"PyTorch runs on the CPU with {torch.get_num_threads()} threads",
            versions=(("torch", torch.__version__),),
        )

    def devices(self) -> tuple[DeviceInfo, ...]:
        name = machine.processor() or machine.machine()
        return (DeviceInfo("cpu", name, f"{machine.machine()} {torch.backends.cpu.get_cpu_capability()}"),)

    def backends(self) -> tuple[AttentionBackend, ...]:
        return self._backends

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return ("cpu_flash", "cpu_sdpa", "cpu_math")

    def runtime_versions(self, device: torch.device) -> tuple[tuple[str, str], ...]:
        """The processor's model, which `platform.processor()` mostly leaves out."""
        return (("processor", line_of(Path("/proc/cpuinfo"), "model name")),)

    @cached_property
    def _backends(self) -> tuple[AttentionBackend, ...]:
        from hal_attn_cpu.flash import CpuFlashBackend
        from hal_attn_cpu.math import CpuMathBackend
        from hal_attn_cpu.sdpa import CpuSdpaBackend

        return (CpuFlashBackend(), CpuSdpaBackend(), CpuMathBackend())
