"""Packed attention on a backend that only knows batches: sequences of like length share one padded call.

`buckets` says which, and where their rows lie; here the calls are made and their rows put back in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from hal_attn.backend import AttentionBackend, AttentionResult
from hal_attn.buckets import PaddedMetadataBuilder, PaddedPlan
from hal_attn.errors import UnsupportedAttentionError
from hal_attn.packing import PackedSequences
from hal_attn.request import AttentionRequest, tensor_options


def run_padded_attention(
    backend: AttentionBackend, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, **options: object
) -> AttentionResult:
    """Packed attention on `backend.forward`: query `[Tq, H, D]`, key `[Tk, Hkv, D]`, value `[Tk, Hkv, Dv]` ->
    `[Tq, H, Dv]` and, with `return_lse`, LSE `[H, Tq]`.

    `options` are those of `varlen_attention`. Sequences without queries or keys are answered by rule: output 0, LSE
    -inf or the sink, gradient 0. The plan for these sequences is made once and kept with them.

    Raises:
        InvalidAttentionInputError: an argument is wrong.
        UnsupportedAttentionError: `backend` does not take the call.
    """
    from hal_attn.validation import packed_request

    request = packed_request(query, key, value, sequences, options)
    refusals = backend.refusals(request)
    if refusals:
        message = f"{backend.name} does not take this call ({request.describe()})"
        raise UnsupportedAttentionError(message, [(backend.name, refusals)])
    plan = padded_plan(backend, sequences, request)
    return run_plan(backend, plan, query, key, value, {**request.options(), **tensor_options(options)})


def run_plan(
    backend: AttentionBackend,
    plan: PaddedPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Mapping[str, Any],
    short: Callable[..., AttentionResult] | None = None,
) -> AttentionResult:
    """`run_padded_attention` of a call that is checked and planned. `short` is the shortest way to a bucket without a
    mask; between calls that take long to prepare, the CPU's threads fall asleep."""
    slopes: Tensor | None = options.get("alibi_slopes")
    sinks: Tensor | None = options.get("sinks")
    outputs: list[Tensor] = []
    lses: list[Tensor] = []
    with_lse = bool(options.get("return_lse"))
    forward = backend.unchecked("forward")
    for bucket in plan.buckets:
        if short is not None and bucket.key_mask is None:
            outputs.append(cast(Tensor, short(*bucket.take(query, key, value))).flatten(0, 1))
            continue
        extra = dict(options)
        if bucket.key_mask is not None:
            extra["key_padding_mask"] = bucket.key_mask
        if slopes is not None and slopes.dim() == 2:
            extra["alibi_slopes"] = slopes.index_select(0, bucket.index)
        result = forward(*bucket.take(query, key, value), **extra)
        if with_lse:
            output, lse = result
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        else:
            output = cast(Tensor, result)
        outputs.append(output.flatten(0, 1))
    output = _assemble(outputs, plan, query.new_zeros(plan.missing, query.shape[1], value.shape[2]))
    if not any(part.requires_grad for part in outputs):
        output = attached(output, query, key, value, *tensor_options(options).values())
    if not with_lse:
        return output
    missing = empty_lse((plan.missing, query.shape[1]), sinks, query.device)
    return output, _assemble(lses, plan, missing).transpose(0, 1)


def padded_plan(backend: AttentionBackend, sequences: PackedSequences, request: AttentionRequest) -> PaddedPlan:
    """The plan for calls like `request`, kept with `sequences` so that all layers share it."""
    return plan_maker(backend, request)(sequences)


def plan_maker(backend: AttentionBackend, request: AttentionRequest) -> Callable[[PackedSequences], PaddedPlan]:
    """`padded_plan` with all but the sequences decided."""
    builder = PaddedMetadataBuilder(backend.capabilities.key_padding_mask)
    key = builder.key(request)
    return lambda sequences: sequences.memo(key, lambda: builder.build(sequences, request))


def empty_lse(shape: tuple[int, ...], sinks: Tensor | None, device: torch.device) -> Tensor:
    """LSE of queries without keys, `[..., H]` float32: -inf, or each head's sink."""
    if sinks is None:
        return torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
    return sinks.to(torch.float32).expand(shape)


def attached(output: Tensor, *inputs: Tensor) -> Tensor:
    """`output`, with a gradient of 0 for each input that wants one: no row of theirs reached it."""
    if not torch.is_grad_enabled():
        return output
    for tensor in inputs:
        if tensor.is_floating_point() and tensor.requires_grad:
            # An empty slice sums to 0 whatever the values are, so a NaN among them stays out.
            output = output + tensor.reshape(-1)[:0].sum().to(output.dtype)
    return output


def _assemble(parts: list[Tensor], plan: PaddedPlan, missing: Tensor) -> Tensor:
    """The buckets' rows and the missing ones as rows in packed order."""
    if missing.shape[0]:
        parts = [*parts, missing]
    if len(parts) < 2 and plan.restore is None:
        return parts[0] if parts else missing
    if plan.restore is None or any(part.requires_grad for part in parts):
        rows = torch.cat(parts)
        return rows if plan.restore is None else rows.index_select(0, plan.restore)
    # Without gradients each row is copied once, to its place; in a graph that would be a copy of everything a bucket.
    output = parts[0].new_empty(plan.tokens_q, *parts[0].shape[1:])
    for rows, place in zip(parts, plan.places, strict=True):
        if place.rows is None:
            assert place.start is not None
            output[place.start : place.start + rows.shape[0]] = rows
        else:
            output.index_copy_(0, place.rows, rows if place.taken is None else rows.index_select(0, place.taken))
    return output
