"""Masks for kernels that know one additive mask only: joined, converted, and the rows in which nothing is visible."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MaskedInputs(NamedTuple):
    """What a kernel with one additive mask is given.

    Attributes:
        query, key, value: `[B, S, H, D]`, with 0 at the queries that see no key and the keys that no query sees, so
            that a NaN there reaches neither output nor gradient.
        added: the additive mask, broadcastable to `[B, H, Sq, Sk]`, without the band; None where nothing is hidden.
        visible: which pairs are visible, causal and window included; None where no mask is given.
        blind: the queries that see no key, bool, broadcastable to `[B, H, Sq]`; None where no mask is given.
        additive: a float mask is among them, so that `added` holds more than 0 and -inf.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    added: Tensor | None
    visible: Tensor | None
    blind: Tensor | None
    additive: bool

    def joined(self) -> Tensor | None:
        """The additive mask with the band in it, for a kernel that takes nothing beside a mask."""
        if self.added is None or self.visible is None:
            return self.added
        return self.added.masked_fill(~self.visible, -torch.inf)


def masked_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    causal: bool,
    window_size: tuple[int, int] | None = None,
) -> MaskedInputs:
    """Query `[B, Sq, H, D]`, key and value `[B, Sk, Hkv, D]` and the masks of a call, ready for such a kernel."""
    seen = _seen(mask, key_padding_mask)
    if seen is None:
        return MaskedInputs(query, key, value, None, None, None, False)
    left, right = edges(causal, window_size)
    visible = seen
    if left >= 0 or right >= 0:
        visible = seen & band(query.shape[1], key.shape[1], left, right, query.device)
    blind = ~visible.any(-1)
    unused = ~visible.flatten(1, 2).any(1)[:, :, None, None]
    return MaskedInputs(
        query.masked_fill(blind.transpose(1, 2).unsqueeze(-1), 0.0),
        key.masked_fill(unused, 0.0),
        value.masked_fill(unused, 0.0),
        _added(mask, key_padding_mask, seen, query.dtype),
        visible,
        blind,
        mask is not None and mask.dtype != torch.bool,
    )


def edges(causal: bool, window_size: tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) of the band that causal and the window leave; -1 is unlimited."""
    left, right = window_size or (-1, -1)
    return left, 0 if causal else right


def band(seqlen_q: int, seqlen_k: int, left: int, right: int, device: torch.device) -> Tensor:
    """Bool `[Sq, Sk]`: the keys `i + Sk - Sq - left <= j <= i + Sk - Sq + right` of each query; -1 is unlimited."""
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if right >= 0:
        visible = visible.tril(seqlen_k - seqlen_q + right)
    if left >= 0:
        visible = visible.triu(seqlen_k - seqlen_q - left)
    return visible


def _seen(mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """Which pairs the masks leave visible: bool, broadcastable to `[B, H, Sq, Sk]`; None: all."""
    seen: Tensor | None = None
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else ~torch.isneginf(mask)
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None, :]
        seen = padding if seen is None else seen & padding
    return seen


def _added(mask: Tensor | None, key_padding_mask: Tensor | None, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """The masks as one: 0 or the float mask's value where visible, -inf where hidden."""
    if mask is not None and mask.dtype != torch.bool:
        if key_padding_mask is None:
            return mask.to(dtype)
        return mask.to(dtype).masked_fill(~seen, -torch.inf)
    # Filled on the device: a number made into a tensor there would be copied, and waited for.
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)
