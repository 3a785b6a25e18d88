"""Masks for kernels that know one additive mask only: joined, converted, and the rows in which nothing is visible."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_keys(
    mask: Tensor | None, key_padding_mask: Tensor | None, causal: bool = False, seqlen_q: int = 1
) -> Tensor | None:
    """Which pairs `mask` and `key_padding_mask` leave visible: bool, broadcastable to `[B, H, Sq, Sk]`; None: all.

    With `causal` the top-left triangle (right where Sq == Sk) is joined in, so that the rows are final.
    """
    seen: Tensor | None = None
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else ~torch.isneginf(mask)
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None, :]
        seen = padding if seen is None else seen & padding
    if causal and seen is not None:
        seen = seen.expand(-1, -1, seqlen_q, seqlen_q).tril()
    return seen


def additive_mask(mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`mask` and `key_padding_mask` as one float mask: 0 or the float mask's value where visible, -inf where hidden."""
    seen = visible_keys(mask, key_padding_mask)
    if seen is None:
        return None
    if mask is not None and mask.dtype != torch.bool:
        if key_padding_mask is None:
            return mask.to(dtype)
        return mask.to(dtype).masked_fill(~seen, -torch.inf)
    visible, hidden = (torch.tensor(number, dtype=dtype, device=seen.device) for number in (0.0, -torch.inf))
    return torch.where(seen, visible, hidden)


def clear_blind(query: Tensor, dead: Tensor) -> Tensor:
    """`query [B, Sq, H, D]` with 0 at the queries that see no key (`dead`, broadcastable to `[B, H, Sq]`), so that a
    NaN there reaches no gradient."""
    return query.masked_fill(dead.transpose(1, 2).unsqueeze(-1), 0.0)


def clear_unseen(rows: Tensor, seen: Tensor) -> Tensor:
    """`rows [B, Sk, Hkv, D]` with 0 at the keys that no query of any head sees, so that a NaN there stays out."""
    used = seen.flatten(1, 2).any(1)
    return rows.masked_fill(~used[:, :, None, None], 0.0)
