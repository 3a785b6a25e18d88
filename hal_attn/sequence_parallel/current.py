"""A GPU made the current one for what is within, which costs nothing where it is so already."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """`torch.cuda.device(device)`, which asks the driver twice, or nothing."""
    return _NOTHING if torch.cuda.current_device() == device.index else torch.cuda.device(device)
