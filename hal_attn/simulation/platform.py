"""The part of a simulated platform that no vendor owns: what it says of itself."""

from __future__ import annotations

import torch

from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.simulation.spec import SimulationSpec


class SimulatedPlatform(Platform):
    """A mixin before a vendor's platform class: CPU tensors are its tensors, one device of one generation is there.

    Args:
        spec: the device.
    """

    device_type = "cpu"
    process_group_backend = "gloo"
    simulated = True

    def __init__(self, spec: SimulationSpec) -> None:
        super().__init__()
        self.spec = spec

    def detect(self) -> Detection:
        chosen = "".join(f", {name}={value}" for name, value in self.spec.choices.items() if value)
        return Detection(
            True,
            f"SIMULATED {self.spec.generation}{chosen}: the vendor's rules on CPU tensors; its speed says nothing",
            versions=(("torch", torch.__version__),),
        )

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo("cpu", f"simulated {self.spec.generation}", self.spec.generation),)

    def runtime_versions(self, device: torch.device) -> tuple[tuple[str, str], ...]:
        """None: what is measured of a simulation says nothing, and is kept by what HAL_ATTN_SIMULATE says."""
        return ()

    def owns(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def architecture(self, device: torch.device) -> str:
        """The generation of the simulated device, whatever the device."""
        return self.spec.generation

    def simulation(self, generation: str | None) -> Platform | None:
        return None
