"""NVIDIA devices without one: the platform's own backends over simulated functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from hal_attn.backend import AttentionBackend
from hal_attn.kernels import KernelBackend
from hal_attn.platform import Platform
from hal_attn.portable.aten_efficient import TorchEfficientBackend
from hal_attn.portable.aten_flash import TorchFlashBackend
from hal_attn.portable.flash_attn import FlashAttentionBackend
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn.simulation.aten import simulated_aten
from hal_attn.simulation.flash_attn import simulated_flash_attn
from hal_attn.simulation.platform import SimulatedPlatform
from hal_attn.simulation.spec import SimulationSpec
from hal_attn_cuda.backends import make_backends
from hal_attn_cuda.cudnn import TorchCudnnBackend
from hal_attn_cuda.flash_attn_3 import FlashAttention3Backend
from hal_attn_cuda.flash_attn_4 import FlashAttention4Backend
from hal_attn_cuda.flashinfer import FlashInferCudnnBackend
from hal_attn_cuda.platform import CudaPlatform
from hal_attn_cuda.simulated.cudnn import simulated_cudnn
from hal_attn_cuda.simulated.flash_attn_3 import simulated_flash_attn_3
from hal_attn_cuda.simulated.flash_attn_4 import simulated_flash_attn_4
from hal_attn_cuda.simulated.flashinfer import simulated_flashinfer

GENERATIONS = ("sm90", "sm80", "sm86", "sm89", "sm100", "sm110", "sm120")
CHOICES = {"fa3": ("fa3_fwd", "full", "old")}


class SimulatedCuda(SimulatedPlatform, CudaPlatform):
    """An NVIDIA device of one generation on CPU tensors, with every library installed.

    `fa3` chooses FlashAttention 3: the wheel fa3-fwd, a build with everything, or a release that returns no LSE.
    """

    @classmethod
    def parse(cls, text: str | None) -> SimulatedCuda:
        """As HAL_ATTN_SIMULATE says it after "cuda:"."""
        return cls(SimulationSpec.parse(text, "cuda", GENERATIONS, CHOICES))

    def validate(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        return ()

    def simulation(self, generation: str | None) -> Platform | None:
        return None

    @cached_property
    def _backends(self) -> tuple[AttentionBackend, ...]:
        return make_backends(_libraries(self.spec), self.architecture)


def _libraries(spec: SimulationSpec) -> dict[type[KernelBackend], Callable[[], Any]]:
    generation, empty_lse = spec.generation, spec.empty_lse
    return {
        FlashAttention3Backend: lambda: simulated_flash_attn_3(spec.choices["fa3"], generation, empty_lse),
        FlashAttention4Backend: lambda: simulated_flash_attn_4(generation, empty_lse),
        FlashAttentionBackend: lambda: simulated_flash_attn(empty_lse),
        FlashInferCudnnBackend: lambda: simulated_flashinfer(empty_lse),
        TorchCudnnBackend: lambda: simulated_cudnn(generation, empty_lse),
        TorchFlashBackend: lambda: simulated_aten(empty_lse),
        TorchEfficientBackend: lambda: simulated_aten(empty_lse),
    }
