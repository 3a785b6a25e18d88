"""Which device and release a simulated operator stands for while it runs."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass

from hal_attn_ascend.generations import Generation, generation_of

LONGEST = 2**31 - 1


@dataclass(frozen=True)
class Device:
    """A device: its name, and what its operators write as LSE of rows without keys, which the vendor leaves open."""

    name: str = "Ascend910B1"
    empty_lse: float = math.inf

    @property
    def generation(self) -> Generation:
        return generation_of(self.name)


# Set around each call, so that one registration with the dispatcher serves every device.
CURRENT: ContextVar[Device] = ContextVar("hal_attn_simulated_npu", default=Device())  # noqa: B039  (it is frozen)


class OperatorError(RuntimeError):
    """A rule of an operator that the call breaks; torch_npu raises RuntimeError."""


def require(condition: bool, operator: str, message: str) -> None:
    """Raises OperatorError unless the rule holds."""
    if not condition:
        raise OperatorError(f"{operator} on {CURRENT.get().name}: {message}")


def require_generation(operator: str, *generations: Generation) -> None:
    """Raises OperatorError where the current device has no such operator."""
    require(CURRENT.get().generation in generations, operator, "not supported on this device")
