"""Packed attention on a backend that has a packed kernel: one call over the sequences that have queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor

from hal_attn.backend import AttentionBackend, AttentionResult
from hal_attn.packing import PackedSequences, rows_of
from hal_attn.padded import attached, empty_lse
from hal_attn.request import AttentionRequest
from hal_attn.transfer import to_device


def native_call(backend: AttentionBackend, request: AttentionRequest) -> Callable[..., AttentionResult]:
    """The call that answers packed calls like `request`: `call(query, key, value, sequences, **tensor_options)`."""
    short, forward = backend.bind_varlen(request), _forward_varlen(backend, request)

    def run(
        query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, **tensors: Tensor
    ) -> AttentionResult:
        if sequences.empty or not sequences.count:
            return _answer_empty(forward, request, query, key, value, sequences, tensors)
        if short is None or tensors:
            return forward(query, key, value, sequences, tensors)
        return short(query, key, value, sequences)

    return run


def _answer_empty(
    forward: Callable[..., AttentionResult],
    request: AttentionRequest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    tensors: dict[str, Tensor],
) -> AttentionResult:
    """`forward` over the sequences that have queries and keys; the others are answered by rule."""
    rest, alive, rows, rows_k = sequences.memo(("alive", query.device), partial(_alive_rows, sequences, query.device))
    slopes = tensors.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        tensors = {**tensors, "alibi_slopes": slopes.index_select(0, alive)}
    output = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    lse = empty_lse((query.shape[0], query.shape[1]), tensors.get("sinks"), query.device)
    if sequences.alive:
        parts = (query.index_select(0, rows), key.index_select(0, rows_k), value.index_select(0, rows_k))
        result = forward(*parts, rest, tensors)
        part = result[0] if request.return_lse else result
        output = output.index_copy(0, rows, cast(Tensor, part))
        if request.return_lse:
            lse = lse.index_copy(0, rows, result[1].transpose(0, 1))
    else:
        output = attached(output, query, key, value, *tensors.values())
    return (output, lse.transpose(0, 1)) if request.return_lse else output


def _forward_varlen(backend: AttentionBackend, request: AttentionRequest) -> Callable[..., AttentionResult]:
    """`forward_varlen` with the options of `request`: a callable of (query, key, value, sequences, tensor_options)."""
    forward, options = backend.unchecked("forward_varlen"), request.options()
    builder = backend.metadata_builder()
    # A builder of its own is one whose metadata its hook expects.
    own = type(backend).metadata_builder is not AttentionBackend.metadata_builder
    key_of = ("metadata", backend, builder.key(request))

    def run(
        query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, tensors: Mapping[str, Tensor]
    ) -> AttentionResult:
        cu_seqlens, cu_seqlens_k = sequences.offsets(query.device)
        arguments: dict[str, object] = {
            "cu_seqlens": cu_seqlens,
            "max_seqlen": sequences.max_seqlen,
            "cu_seqlens_host": sequences.cu_seqlens_host,
        }
        if not sequences.equal_lengths:
            arguments["cu_seqlens_k"] = cu_seqlens_k
            arguments["max_seqlen_k"] = sequences.max_seqlen_k
            arguments["cu_seqlens_k_host"] = sequences.cu_seqlens_k_host
        if own:
            arguments["metadata"] = sequences.memo(key_of, lambda: builder.build(sequences, request))
        result: AttentionResult = forward(query, key, value, **arguments, **options, **tensors)
        return result

    return run


def _alive_rows(sequences: PackedSequences, device: torch.device) -> tuple[PackedSequences, Tensor, Tensor, Tensor]:
    """The sequences with queries and keys, their indices, and their query and key rows among all; rows without the
    other side go."""
    rows = rows_of(sequences.lengths, [bool(keys) for keys in sequences.lengths_k])
    rows_k = rows_of(sequences.lengths_k, [bool(queries) for queries in sequences.lengths])
    indices = torch.tensor(sequences.alive, dtype=torch.int64, device="cpu")
    return sequences.of_alive(), to_device(indices, device), to_device(rows, device), to_device(rows_k, device)
