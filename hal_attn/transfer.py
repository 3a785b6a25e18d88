"""Small tensors of the host on their way to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, made on the CPU, on `device`; nothing waits where the device's runtime has pinned memory.

    Only pinned memory is copied without waiting, and pinning needs the device's own allocator, which PyTorch's outside
    devices need not have.
    """
    if device.type == "cpu":
        return tensor
    try:
        tensor = tensor.pin_memory()
    except RuntimeError:
        # No pinned memory here: the copy waits, and is right.
        return tensor.to(device)
    return tensor.to(device, non_blocking=True)
