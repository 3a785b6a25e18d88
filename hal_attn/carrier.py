"""Objects of the host that cross a compiled graph: a graph passes tensors only, so each rides on one.

A graph knows nothing of what rides, so that another object in its place is no reason to compile again. An object rides
on the storage of its tensor: what PyTorch does to a tensor on its way (detach it, save it for the backward pass) makes
another tensor on the same storage, and the object lives as long as that does.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

_ATTRIBUTE = "_hal_attn_carried"
_numbers = itertools.count(1)
# Only to find again what others keep alive.
_known: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


def carry(thing: object) -> Tensor:
    """A small CPU tensor on which `thing` rides. Its value is 0, whatever rides, and a copy of it carries nothing."""
    tensor = _tensor(0)
    setattr(tensor.untyped_storage(), _ATTRIBUTE, thing)
    return tensor


def refer(thing: object, kept: object = None) -> Tensor:
    """A small CPU tensor that leads to `thing` while that lives, and so do its copies; `kept`, which must not hold the
    tensor itself, is kept alive by it."""
    number = next(_numbers)
    _known[number] = thing
    tensor = _tensor(number)
    setattr(tensor.untyped_storage(), _ATTRIBUTE, kept)
    return tensor


def carried_by(tensor: Tensor) -> object | None:
    """What rides on this tensor, or what it leads to; None where that is gone, or nothing ever did."""
    riding: object | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
    return _known.get(int(tensor)) if riding is None else riding


def _tensor(value: int) -> Tensor:
    # It may be saved for a backward pass, which a tensor made in inference mode may not.
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=torch.int64, device="cpu")
