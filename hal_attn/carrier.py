"""Objects of the host that cross a compiled graph: a graph passes tensors only, so each rides on the storage of one.

The storage, because what PyTorch does to a tensor on its way (detach it, save it for the backward pass) makes another
tensor on the same storage. The object lives as long as that does, and a graph knows nothing of it, so that another
object in its place is no reason to compile again.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ATTRIBUTE = "_hal_attn_carried"


def carry(carried: object) -> Tensor:
    """A small CPU tensor on whose storage `carried` rides; its value means nothing."""
    # It may be saved for a backward pass, which a tensor made in inference mode may not.
    with torch.inference_mode(False):
        tensor = torch.zeros(1, dtype=torch.int64, device="cpu")
    setattr(tensor.untyped_storage(), _ATTRIBUTE, carried)
    return tensor


def carried_by(tensor: Tensor) -> object | None:
    """What rides on the storage of this tensor; None where it is a copy, or nothing ever did."""
    return getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
