"""The masks of a call as the one additive mask that PyTorch's kernels read."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hal_attn.masks import MaskedInputs
from hal_attn.portable.operators import aligned

ALIGNMENT = 16


def joined_bias(masks: MaskedInputs, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """Masks and band as a bias `[B|1, H|1, Sq, Sk]`, its rows aligned in memory; None where nothing is hidden.

    A row in which nothing is visible is left open: kernels differ on what it gives, and some give NaN, which would
    reach the gradients of all keys. Its output is set to 0 afterwards, and so is the gradient that comes back.
    """
    added = masks.joined()
    if added is None:
        return None
    if masks.blind is not None:
        added = added.masked_fill(masks.blind.unsqueeze(-1), 0.0)
    added = added.expand(*added.shape[:-2], seqlen_q, seqlen_k)
    excess = -seqlen_k % ALIGNMENT
    return F.pad(added, (0, excess))[..., :seqlen_k] if excess else aligned(added.contiguous(), ALIGNMENT)
