"""Device generations, by the name that torch_npu gives a device."""

from __future__ import annotations

from enum import Enum


class Generation(Enum):
    """What decides which attention operators a device has."""

    A2 = "Atlas A2"
    A3 = "Atlas A3"
    ASCEND_950 = "Ascend 950"
    INFERENCE_310P = "Atlas inference card 310P"
    OTHER = "another generation"


# The digit matters: "Ascend910B1" to "Ascend910B4" are Atlas A2, while "Ascend910B" alone is a chip of the first 910.
_A2 = ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4")
_BEGINNINGS = (
    *((name, Generation.A2) for name in _A2),
    ("Ascend910_93", Generation.A3),
    ("Ascend950", Generation.ASCEND_950),
    ("Ascend310P", Generation.INFERENCE_310P),
)


def generation_of(architecture: str) -> Generation:
    """The generation of a device called `architecture`, as `torch.npu.get_device_name` says it."""
    return next((generation for start, generation in _BEGINNINGS if architecture.startswith(start)), Generation.OTHER)
