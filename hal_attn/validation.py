"""Checks the caller's tensors and options, and turns them into an `AttentionRequest`.

Everything here depends on shapes, dtypes, devices and plain options only, so it runs once for each kind of call. What
depends on values (packed offsets) is checked where those values are first read, in `packing`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from hal_attn import kinds
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.request import AttentionRequest, MaskKind, canonical_band

if TYPE_CHECKING:
    from hal_attn.packing import PackedSequences


def dense_request(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, object]) -> AttentionRequest:
    """The request of a batched call; raises InvalidAttentionInputError."""
    _check_tensors(query, key, value, kinds.DENSE)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[0] != query.shape[0]:
            raise InvalidAttentionInputError(name, f"batch {tensor.shape[0]}", f"the batch of query, {query.shape[0]}")
    _check_key_value(key, value, 1)
    batch, seqlen_q, heads, _ = query.shape
    seqlen_k = key.shape[1]
    mask_kind, mask = _check_mask(options.get("mask"), query, (batch, heads, seqlen_q, seqlen_k))
    padding = _check_key_padding(options.get("key_padding_mask"), query, (batch, seqlen_k))
    return _request(
        query,
        key,
        value,
        options,
        mask_kind,
        mask,
        packed=False,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        tokens_q=batch * seqlen_q,
        tokens_k=batch * seqlen_k,
        equal_lengths=seqlen_q == seqlen_k,
        key_padding_mask=padding is not None,
    )


def packed_request(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, options: Mapping[str, object]
) -> AttentionRequest:
    """The request of a packed call; raises InvalidAttentionInputError."""
    _check_tensors(query, key, value, kinds.PACKED)
    _check_key_value(key, value, 0)
    sequences.check_tensors(query, key)
    return _request(
        query,
        key,
        value,
        options,
        "none",
        None,
        packed=True,
        batch=sequences.count,
        seqlen_q=sequences.max_seqlen,
        seqlen_k=sequences.max_seqlen_k,
        tokens_q=query.shape[0],
        tokens_k=key.shape[0],
        equal_lengths=sequences.equal_lengths,
        uniform=sequences.uniform,
    )


def _request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Mapping[str, object],
    mask_kind: MaskKind,
    mask: Tensor | None,
    *,
    seqlen_q: int | None,
    seqlen_k: int | None,
    **shape: object,
) -> AttentionRequest:
    heads, head_dim = query.shape[-2:]
    sinks = _check_sinks(options.get("sinks"), query, heads)
    batch = shape["batch"]
    assert isinstance(batch, int)
    slopes = _check_slopes(options.get("alibi_slopes"), query, batch, heads)
    causal = _flag("causal", options.get("causal", False))
    causal, window = canonical_band(causal, _check_window(options.get("window_size")), seqlen_q, seqlen_k)
    wants_grad = torch.is_grad_enabled()
    option_grads = tuple(
        name
        for name, tensor in (("mask", mask), ("sinks", sinks), ("alibi_slopes", slopes))
        if wants_grad and tensor is not None and tensor.requires_grad
    )
    return AttentionRequest(
        device=query.device,
        dtype=query.dtype,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=key.shape[-2],
        head_dim=head_dim,
        value_head_dim=value.shape[-1],
        scale=_check_scale(options.get("scale")),
        causal=causal,
        window_size=window,
        mask=mask_kind,
        mask_dtype=None if mask is None else mask.dtype,
        mask_shape=None if mask is None else tuple(mask.shape),
        softcap=_check_softcap(options.get("softcap", 0.0)),
        sinks=sinks is not None,
        alibi_slopes=0 if slopes is None else slopes.dim(),
        dropout_p=_check_dropout(options.get("dropout_p", 0.0)),
        deterministic=_flag("deterministic", options.get("deterministic", False)),
        return_lse=_flag("return_lse", options.get("return_lse", False)),
        needs_grad=wants_grad and (query.requires_grad or key.requires_grad or value.requires_grad),
        needs_option_grad=option_grads,
        **shape,  # type: ignore[arg-type]
    )


def _check_tensors(query: object, key: object, value: object, layouts: tuple[str, str, str]) -> None:
    rank = layouts[0].count(",") + 1
    for name, tensor, layout in zip(("query", "key", "value"), (query, key, value), layouts, strict=True):
        _refuse(kinds.tensor(name, tensor, f"a torch.Tensor {layout}"))
        assert isinstance(tensor, Tensor)
        if tensor.layout != torch.strided:
            raise InvalidAttentionInputError(name, f"a tensor of layout {tensor.layout}", f"a dense tensor {layout}")
        if tensor.dim() != rank:
            other = "varlen_attention takes packed [T, H, D]" if rank == 4 else "attention takes batched [B, S, H, D]"
            raise InvalidAttentionInputError(
                name, f"{tensor.dim()} dimensions {tuple(tensor.shape)}", f"{rank} dimensions {layout}", other
            )
        if not tensor.is_floating_point():
            raise InvalidAttentionInputError(name, f"dtype {tensor.dtype}", "a floating-point dtype")
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise InvalidAttentionInputError(
                name,
                f"dtype {tensor.dtype}",
                f"the dtype of query, {query.dtype}",
                f"convert with {name}.to(query.dtype)",
            )
        if tensor.device != query.device:
            raise InvalidAttentionInputError(
                name,
                f"device {tensor.device}",
                f"the device of query, {query.device}",
                f"move it with {name}.to(query.device)",
            )
    _check_heads(query, key, value)


def _check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    heads, head_dim = query.shape[-2:]
    kv_heads, key_dim = key.shape[-2:]
    if head_dim == 0 or heads == 0:
        raise InvalidAttentionInputError(
            "query", f"{heads} heads of head dim {head_dim}", "at least one head and a head dim of at least 1"
        )
    if key_dim != head_dim:
        raise InvalidAttentionInputError("key", f"head dim {key_dim}", f"the head dim of query, {head_dim}")
    if kv_heads == 0 or heads % kv_heads:
        raise InvalidAttentionInputError(
            "key",
            f"{kv_heads} heads",
            f"a number of heads, at least 1, that divides the {heads} heads of query",
            "query head h reads key head h // (H // Hkv)",
        )
    if value.shape[-2] != kv_heads:
        raise InvalidAttentionInputError("value", f"{value.shape[-2]} heads", f"as many heads as key, {kv_heads}")
    if value.shape[-1] == 0:
        raise InvalidAttentionInputError("value", "head dim 0", "a head dim of at least 1")


def _check_key_value(key: Tensor, value: Tensor, axis: int) -> None:
    if key.shape[axis] != value.shape[axis]:
        raise InvalidAttentionInputError(
            "value", f"{value.shape[axis]} rows", f"as many rows as key, {key.shape[axis]}"
        )


def _check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise InvalidAttentionInputError(name, f"a tensor of layout {tensor.layout}", "a dense tensor")
    if tensor.device != query.device:
        raise InvalidAttentionInputError(
            name,
            f"device {tensor.device}",
            f"the device of query, {query.device}",
            f"move it with {name}.to(query.device)",
        )


def _check_mask(mask: object, query: Tensor, full: tuple[int, int, int, int]) -> tuple[MaskKind, Tensor | None]:
    if mask is None:
        return "none", None
    allowed = f"a bool (True = may attend) or float (added) tensor broadcastable to [B, H, Sq, Sk] = {list(full)}"
    _refuse(kinds.tensor("mask", mask, allowed))
    assert isinstance(mask, Tensor)
    if mask.dim() != 4:
        remedy = (
            "a [B, Sk] mask of real keys is key_padding_mask; a [Sq, Sk] mask is mask[None, None]"
            if mask.dim() == 2
            else "add the missing dimensions of size 1"
        )
        raise InvalidAttentionInputError("mask", f"{mask.dim()} dimensions {tuple(mask.shape)}", allowed, remedy)
    if any(have not in (1, need) for have, need in zip(mask.shape, full, strict=True)):
        raise InvalidAttentionInputError("mask", f"shape {tuple(mask.shape)}", allowed)
    _check_device("mask", mask, query)
    if mask.dtype == torch.bool:
        return "bool", mask
    if mask.is_floating_point():
        return "float", mask
    raise InvalidAttentionInputError("mask", f"dtype {mask.dtype}", allowed, "convert an integer mask with mask.bool()")


def _check_key_padding(mask: object, query: Tensor, shape: tuple[int, int]) -> Tensor | None:
    if mask is None:
        return None
    allowed = f"a bool tensor [B, Sk] = {list(shape)}, True = a real key"
    _refuse(kinds.tensor("key_padding_mask", mask, allowed))
    assert isinstance(mask, Tensor)
    if mask.dim() != 2:
        raise InvalidAttentionInputError(
            "key_padding_mask",
            f"{mask.dim()} dimensions {tuple(mask.shape)}",
            allowed,
            "a four-dimensional mask goes in mask",
        )
    if tuple(mask.shape) != shape:
        raise InvalidAttentionInputError("key_padding_mask", f"shape {tuple(mask.shape)}", allowed)
    if mask.dtype != torch.bool:
        raise InvalidAttentionInputError("key_padding_mask", f"dtype {mask.dtype}", allowed, "convert with .bool()")
    _check_device("key_padding_mask", mask, query)
    return mask


def _check_sinks(sinks: object, query: Tensor, heads: int) -> Tensor | None:
    if sinks is None:
        return None
    allowed = f"a float tensor [H] = [{heads}], one logit a query head"
    _refuse(kinds.tensor("sinks", sinks, allowed))
    assert isinstance(sinks, Tensor)
    if tuple(sinks.shape) != (heads,) or not sinks.is_floating_point():
        raise InvalidAttentionInputError("sinks", f"shape {tuple(sinks.shape)} {sinks.dtype}", allowed)
    _check_device("sinks", sinks, query)
    return sinks


def _check_slopes(slopes: object, query: Tensor, batch: int, heads: int) -> Tensor | None:
    if slopes is None:
        return None
    allowed = f"a float tensor [H] = [{heads}] or [B, H] = [{batch}, {heads}]; the bias is -slope * |i + Sk - Sq - j|"
    _refuse(kinds.tensor("alibi_slopes", slopes, allowed))
    assert isinstance(slopes, Tensor)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)) or not slopes.is_floating_point():
        raise InvalidAttentionInputError("alibi_slopes", f"shape {tuple(slopes.shape)} {slopes.dtype}", allowed)
    _check_device("alibi_slopes", slopes, query)
    return slopes


def _flag(name: str, value: object) -> bool:
    _refuse(kinds.flag(name, value))
    return cast(bool, value)


def _number(name: str, value: object, allowed: str) -> float:
    _refuse(kinds.number(name, value, allowed))
    return float(cast(float, value))


def _check_scale(scale: object) -> float | None:
    if scale is None:
        return None
    number = _number("scale", scale, kinds.SCALES)
    if not math.isfinite(number):
        raise InvalidAttentionInputError("scale", str(scale), kinds.SCALES)
    return number


def _check_softcap(softcap: object) -> float:
    number = _number("softcap", softcap, kinds.SOFTCAPS)
    if not math.isfinite(number) or number < 0:
        raise InvalidAttentionInputError("softcap", str(softcap), kinds.SOFTCAPS)
    return number


def _check_dropout(dropout_p: object) -> float:
    number = _number("dropout_p", dropout_p, kinds.PROBABILITIES)
    if not 0.0 <= number < 1.0:
        raise InvalidAttentionInputError("dropout_p", str(dropout_p), kinds.PROBABILITIES)
    return number


def _check_window(window: object) -> tuple[int, int] | None:
    if window is None:
        return None
    _refuse(kinds.window(window))
    left, right = (-1 if edge is None else edge for edge in cast("tuple[int | None, int | None]", window))
    if left < -1 or right < -1:
        raise InvalidAttentionInputError("window_size", repr(window), kinds.WINDOWS)
    return left, right


def _refuse(fault: kinds.Fault | None) -> None:
    if fault is not None:
        raise InvalidAttentionInputError(*fault)
