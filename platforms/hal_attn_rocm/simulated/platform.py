"""The AMD platform over simulated kernels: its own adapters and rules, on CPU tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hal_attn.simulation.platform import SimulatedPlatform
from hal_attn.simulation.spec import SimulationSpec
from hal_attn_rocm.platform import RocmPlatform
from hal_attn_rocm.simulated.aiter import SimulatedAiter
from hal_attn_rocm.simulated.aiter_triton import SimulatedAiterTriton
from hal_attn_rocm.simulated.aotriton import simulated_aotriton
from hal_attn_rocm.simulated.flash_attn import simulated_rocm_flash_attn

GENERATIONS = ("gfx942", "gfx950", "gfx90a", "gfx1100")
CHOICES = {"flash_attn": ("", "ck", "triton")}


class SimulatedRocm(SimulatedPlatform, RocmPlatform):
    """One simulated AMD device: `rocm:gfx942,empty_lse=nan,flash_attn=triton`. Without a choice, flash-attn runs over
    CK where that has kernels, and over Triton elsewhere."""

    def libraries(self) -> Mapping[str, Callable[[], Any]]:
        generation, chosen = self.spec.generation, self.spec.empty_lse
        return {
            "aiter": partial(SimulatedAiter, generation, -math.inf if chosen is None else chosen),
            "aiter_triton": partial(SimulatedAiterTriton, generation, 0.0 if chosen is None else chosen),
            "flash_attn": partial(simulated_rocm_flash_attn, "triton" if self.flash_over_triton() else "ck", chosen),
            "aten": partial(simulated_aotriton, generation, chosen),
        }

    def flash_over_triton(self) -> bool:
        kernels = self.spec.choices["flash_attn"]
        return kernels == "triton" if kernels else self.spec.generation.startswith("gfx1")


def simulated_rocm(text: str | None) -> SimulatedRocm:
    """The device that HAL_ATTN_SIMULATE asks for behind `rocm:`."""
    return SimulatedRocm(SimulationSpec.parse(text, "rocm", GENERATIONS, CHOICES))
