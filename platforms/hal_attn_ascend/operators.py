"""What the adapters ask of torch_npu's operators, and the shapes that all of them want."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

UNLIMITED = 2**31 - 1
# In layouts with the heads inside, the row of all heads must stay below this many elements.
LONGEST_ROW = 65535


def torch_npu_operators() -> Any:
    """The operators of the installed torch_npu, `torch.ops.npu`; ImportError without it."""
    import_module("torch_npu")
    return torch.ops.npu


def takes_argument(library: Any, operator: str, argument: str) -> bool:
    """Whether `library` has `operator` with that argument: both come with one release or another of torch_npu."""
    packet = getattr(library, operator, None)
    if packet is None:
        return False
    return any(known.name == argument for known in packet.default._schema.arguments)


def to_head_dim(tensor: Tensor, dim: int) -> Tensor:
    """`tensor` with zeros behind its last dimension up to `dim`, contiguous: the operators take nothing else."""
    if tensor.shape[-1] != dim:
        tensor = F.pad(tensor, (0, dim - tensor.shape[-1]))
    return tensor.contiguous()


def multiple_of_16(*dims: int) -> int:
    """The largest of `dims`, rounded up to a multiple of 16: what the inference operators take in 16-bit dtypes."""
    return -(-max(dims) // 16) * 16


def hidden_pairs(visible: Tensor, blind: Tensor, full: tuple[int, int, int, int]) -> Tensor:
    """The operators' mask of a user's: bool, True where a key is hidden, `[B, H, Sq, Sk]`, `[B, 1, Sq, Sk]` or
    `[1, 1, Sq, Sk]`.

    Rows that see no key are left open, as the operators lose precision in rows that are hidden altogether; what they
    then give is replaced by the caller.
    """
    hidden = ~(visible | blind.unsqueeze(-1))
    batch = full[0] if hidden.shape[0] > 1 or hidden.shape[1] > 1 else 1
    heads = full[1] if hidden.shape[1] > 1 else 1
    return hidden.expand(batch, heads, *full[2:]).contiguous()
