"""Small tensors of the host on their way to a device, and which device that is."""

from __future__ import annotations

import torch
from torch import Tensor

from hal_attn.errors import InvalidAttentionInputError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, made on the CPU, on `device`; nothing waits where the device's runtime has pinned memory.

    Only pinned memory is copied without waiting, and pinning needs the device's own allocator, which PyTorch's outside
    devices need not have.
    """
    if device.type == "cpu":
        return tensor
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # The copy would be part of the graph, and read this host memory at each replay.
        raise InvalidAttentionInputError(
            "sequences",
            "used for the first time while a CUDA graph is captured",
            "sequences, or a plan, that a call of this kind has used before",
            "make the same call once before the capture",
        )
    try:
        tensor = tensor.pin_memory()
    except RuntimeError:
        # No pinned memory here: the copy waits, and is right.
        return tensor.to(device)
    return tensor.to(device, non_blocking=True)


def with_index(device: torch.device | str) -> torch.device:
    """`device` as tensors on it name it: "cuda" is the current one of several."""
    device = torch.device(device)
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    return torch.empty(0, device=device).device
