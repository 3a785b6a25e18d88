"""Masks under a plan: checked against it, and made whole where each rank has its part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal_attn.errors import InvalidAttentionInputError
from hal_attn.sequence_parallel.gathering import gather_rows

if TYPE_CHECKING:
    from hal_attn.sequence_parallel.plan import Plan


def check_masks(plan: Plan, mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> None:
    """For query `[T, H, D]`.

    Raises:
        InvalidAttentionInputError: a mask on a packed plan; one of another dtype, device or extent than the plan says;
            one that wants a gradient.
    """
    about = plan.description
    sharded = about.masks == "sharded"
    for name, tensor in (("mask", mask), ("key_padding_mask", key_padding_mask)):
        if tensor is None:
            continue
        if about.batch is None:
            raise InvalidAttentionInputError(
                name, "given", "none: this plan is packed", "masks need batch= and seqlen="
            )
        if not isinstance(tensor, Tensor) or tensor.device != query.device:
            got = f"device {tensor.device}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise InvalidAttentionInputError(name, got, f"a tensor on the device of query, {query.device}")
    batch = about.batch or 0
    if mask is not None:
        rows = plan.positions.numel() if sharded else _one(about.lengths)
        _check_mask(mask, (batch, query.shape[1], rows, _one(about.lengths_k)), sharded)
    if key_padding_mask is not None:
        keys = plan.positions_kv.numel() if sharded else _one(about.lengths_k)
        if key_padding_mask.dtype != torch.bool or tuple(key_padding_mask.shape) != (batch, keys):
            got = f"{key_padding_mask.dtype} of shape {tuple(key_padding_mask.shape)}"
            raise InvalidAttentionInputError("key_padding_mask", got, f"bool of shape ({batch}, {keys})", _way(sharded))


def whole_masks(
    plan: Plan, mask: Tensor | None, key_padding_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Checked masks -> `mask` broadcastable to `[B, H, Sq, Sk]` and `key_padding_mask` `[B, Sk]` of whole sequences."""
    about = plan.description
    if about.masks == "sharded":
        if mask is not None:
            mask = _gathered(plan, mask)
        if key_padding_mask is not None:
            flat = key_padding_mask.flatten()
            whole = gather_rows(plan.groups, plan.schedule.keys, plan.rows_kv, flat, sum(about.lengths_k))
            key_padding_mask = whole.view(about.batch or 0, _one(about.lengths_k))
    return mask, key_padding_mask


def masks_without_values(
    plan: Plan, mask: Tensor | None, key_padding_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What `whole_masks` gives as to shapes and dtypes, without communication."""
    about = plan.description
    if about.masks == "sharded":
        if mask is not None:
            batch, heads, _, keys = mask.shape
            mask = mask.new_zeros(1).expand(batch, heads, _one(about.lengths), keys)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.new_zeros(1).expand(about.batch or 0, _one(about.lengths_k))
    return mask, key_padding_mask


def _gathered(plan: Plan, mask: Tensor) -> Tensor:
    """A mask of this rank's query rows -> of all. One row may be for all, or all that a rank has: both are spread."""
    about = plan.description
    batch = about.batch or 0
    rows = mask.expand(batch, -1, plan.positions.numel(), -1).transpose(1, 2).flatten(0, 1)
    whole = gather_rows(plan.groups, plan.schedule.queries, plan.rows, rows.contiguous(), sum(about.lengths))
    batched: Tensor = whole.unflatten(0, (batch, -1))
    return batched.transpose(1, 2)


def _check_mask(mask: Tensor, extents: tuple[int, ...], sharded: bool) -> None:
    if mask.dim() != 4:
        raise InvalidAttentionInputError(
            "mask", f"{mask.dim()} dimensions", "four, broadcastable to [B, H, Sq, Sk]", "[B, Sk] is key_padding_mask"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InvalidAttentionInputError("mask", f"dtype {mask.dtype}", "bool, True = may attend, or float, added")
    if any(size not in (1, extent) for size, extent in zip(mask.shape, extents, strict=True)):
        raise InvalidAttentionInputError(
            "mask", f"shape {tuple(mask.shape)}", f"broadcastable to {extents}", _way(sharded)
        )
    if mask.requires_grad:
        raise InvalidAttentionInputError("mask", "a mask that wants a gradient", "one without", "mask.detach()")


def _way(sharded: bool) -> str:
    if sharded:
        return "this plan takes masks sharded: this rank's query rows, this rank's keys of a key_padding_mask"
    return "this plan takes masks whole; groups.plan(masks='sharded') takes each rank's part"


def _one(lengths: tuple[int, ...]) -> int:
    return lengths[0] if lengths else 0
