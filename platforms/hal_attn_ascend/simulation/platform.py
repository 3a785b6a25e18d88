"""The simulated Ascend platform: the real adapters over simulated operators."""

from __future__ import annotations

from typing import Any

from hal_attn.simulation.platform import SimulatedPlatform
from hal_attn.simulation.spec import SimulationSpec
from hal_attn_ascend.platform import AscendPlatform

GENERATIONS = ("Ascend910B1", "Ascend910_9391", "Ascend950DT", "Ascend310P3")
# Releases of torch_npu, each with the operators and arguments that it has; and who dispatches them: schemas of our own,
# or an installed torch_npu, whose operators then get simulated kernels for CPU tensors.
CHOICES = {"torch_npu": ("26.0", "7.3", "7.2", "7.0"), "library": ("simulated", "torch_npu")}


class SimulatedAscend(SimulatedPlatform, AscendPlatform):
    """`ascend` on CPU tensors, as `HAL_ATTN_SIMULATE=ascend:GENERATION,NAME=VALUE` asks for."""

    @classmethod
    def from_text(cls, text: str | None) -> SimulatedAscend:
        """The device that `text` describes; ConfigurationError for one that is not known."""
        return cls(SimulationSpec.parse(text, "ascend", GENERATIONS, CHOICES))

    def operators(self) -> Any:
        from hal_attn_ascend.simulation.library import SimulatedOperators

        return SimulatedOperators.of(self.spec)
