"""From a request to the call that answers it: made once for each kind of call, kept, and run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor

from hal_attn import settings as environment
from hal_attn.backend import AttentionBackend, AttentionResult
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.packing import PackedSequences
from hal_attn.padded import attached, empty_lse, plan_maker, run_plan
from hal_attn.registry import Registry
from hal_attn.request import AttentionRequest
from hal_attn.selection import Selection, explicit_names, require, select
from hal_attn.tuning import tuned
from hal_attn.validation import dense_request, packed_request

_log = logging.getLogger("hal_attn")

BoundCall = Callable[..., AttentionResult]
TENSOR_OPTIONS = ("mask", "key_padding_mask", "sinks", "alibi_slopes")


def bind_dense(
    registry: Registry, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, object], backend: object
) -> BoundCall:
    """The call that answers batched calls like this one: `call(query, key, value, **tensor_options)`."""
    request = dense_request(query, key, value, options)
    tensors = {name: options[name] for name in TENSOR_OPTIONS if options.get(name) is not None}
    settings = environment.read()
    environment.apply_log_level(settings)
    explicit = explicit_names(backend, settings)
    selection = select(request, registry, settings, explicit)
    if not (request.tokens_q and request.tokens_k):
        require(selection, registry, settings)
        _log.debug("no queries or no keys: answered by rule, no kernel")
        return partial(_answer_without_keys, request)

    def run(candidate: AttentionBackend) -> object:
        return _dense_call(candidate, request, bool(tensors))(query, key, value, **tensors)

    selection = tuned(selection, registry, settings, explicit, run)
    chosen = require(selection, registry, settings)
    _log.info("%s, by %s, for %s", chosen.name, selection.source, request.describe())
    return _without_autocast(_dense_call(chosen, request, bool(tensors)), request)


def bind_packed(
    registry: Registry,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    options: Mapping[str, object],
    backend: object,
) -> BoundCall:
    """The call that answers packed calls like this one: `call(query, key, value, sequences, **tensor_options)`."""
    settings = environment.read()
    environment.apply_log_level(settings)
    request = packed_request(query, key, value, sequences, options)
    tensors = {name: options[name] for name in TENSOR_OPTIONS if options.get(name) is not None}
    explicit = explicit_names(backend, settings)
    selection = select(request, registry, settings, explicit)
    _check_empty(sequences, selection, settings)

    def run(candidate: AttentionBackend) -> object:
        return _packed_call(candidate, request)(query, key, value, sequences, **tensors)

    if request.tokens_q and request.tokens_k:
        selection = tuned(selection, registry, settings, explicit, run)
    chosen = require(selection, registry, settings)
    _log.info("%s, by %s, for %s", chosen.name, selection.source, request.describe())
    call = _without_autocast(_packed_call(chosen, request), request)
    if settings.validate == "full":
        return partial(_validated, call)
    return call


def explain_call(
    registry: Registry,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences | None,
    options: Mapping[str, object],
    backend: object,
) -> Selection:
    """The selection of the call that these arguments would make; measures nothing."""
    settings = environment.read()
    if sequences is None:
        request = dense_request(query, key, value, options)
    else:
        request = packed_request(query, key, value, sequences, options)
    explicit = explicit_names(backend, settings)
    selection = select(request, registry, settings, explicit)
    if sequences is not None:
        _check_empty(sequences, selection, settings)
    return tuned(selection, registry, settings, explicit, None)


def _dense_call(backend: AttentionBackend, request: AttentionRequest, with_tensors: bool) -> BoundCall:
    short = None if with_tensors else backend.bind(request)
    return short if short is not None else partial(backend.forward, **request.options())


def _packed_call(backend: AttentionBackend, request: AttentionRequest) -> BoundCall:
    if backend.implements("forward_varlen"):
        return partial(_run_packed, backend, request)
    options, short, plan_of = request.options(), backend.bind(request), plan_maker(backend, request)

    def run(
        query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, **tensors: Tensor
    ) -> AttentionResult:
        plan = plan_of(sequences)
        if short is not None and plan.whole is not None and not tensors:
            # One call over views: what it costs beyond that call is what a caller with tiny inputs sees.
            count, length_q, length_k = plan.whole
            if count == 1:
                return cast(Tensor, short(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0))).squeeze(0)
            output = short(
                query.view(count, length_q, *query.shape[1:]),
                key.view(count, length_k, *key.shape[1:]),
                value.view(count, length_k, *value.shape[1:]),
            )
            return cast(Tensor, output).flatten(0, 1)
        return run_plan(backend, plan, query, key, value, {**options, **tensors})

    return run


def _run_packed(
    backend: AttentionBackend,
    request: AttentionRequest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    **tensors: Tensor,
) -> AttentionResult:
    """One `forward_varlen` over the sequences that have both queries and keys; the others are answered by rule."""
    if not sequences.empty:
        return _forward_varlen(backend, request, query, key, value, sequences, tensors)
    kept = [i for i in range(sequences.count) if i not in set(sequences.empty)]
    lengths = [sequences.lengths[i] for i in kept]
    lengths_k = None if sequences.equal_lengths else [sequences.lengths_k[i] for i in kept]
    rest = sequences.memo("compact", lambda: PackedSequences.from_lengths(lengths, lengths_k, device=sequences.device))
    alive = [bool(keys) for keys in sequences.lengths_k]
    rows = sequences.memo(("rows", query.device), lambda: _row_mask(sequences.lengths, alive, query.device))
    used = [bool(queries) for queries in sequences.lengths]
    rows_k = sequences.memo(("rows_k", query.device), lambda: _row_mask(sequences.lengths_k, used, query.device))
    slopes = tensors.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        tensors = {**tensors, "alibi_slopes": slopes[kept]}
    output = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    lse = empty_lse((query.shape[0], query.shape[1]), tensors.get("sinks"), query.device)
    if kept:
        parts = (query.index_select(0, rows), key.index_select(0, rows_k), value.index_select(0, rows_k))
        result = _forward_varlen(backend, request, *parts, rest, tensors)
        part = result[0] if request.return_lse else result
        output = output.index_copy(0, rows, cast(Tensor, part))
        if request.return_lse:
            lse = lse.index_copy(0, rows, result[1].transpose(0, 1))
    else:
        output = attached(output, query, key, value, *tensors.values())
    return (output, lse.transpose(0, 1)) if request.return_lse else output


def _forward_varlen(
    backend: AttentionBackend,
    request: AttentionRequest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    tensors: Mapping[str, Tensor],
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
    if type(backend).metadata_builder is not AttentionBackend.metadata_builder:
        builder = backend.metadata_builder()
        key_of = ("metadata", backend.name, builder.key(request))
        arguments["metadata"] = sequences.memo(key_of, lambda: builder.build(sequences, request))
    return backend.forward_varlen(query, key, value, **arguments, **request.options(), **tensors)


def _row_mask(lengths: tuple[int, ...], keep: list[bool], device: torch.device) -> Tensor:
    """Indices of the rows of the sequences to keep."""
    flags = torch.tensor(keep, dtype=torch.bool).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    return flags.nonzero().flatten().to(device, non_blocking=True)


def _answer_without_keys(
    request: AttentionRequest, query: Tensor, key: Tensor, value: Tensor, **tensors: Tensor
) -> AttentionResult:
    """A batched call without any query or any key: output 0, LSE -inf or the sink, gradient 0."""
    batch, seqlen_q, heads, _ = query.shape
    output = query.new_zeros(batch, seqlen_q, heads, value.shape[-1])
    output = attached(output, query, key, value, *tensors.values())
    if not request.return_lse:
        return output
    return output, empty_lse((batch, seqlen_q, heads), tensors.get("sinks"), query.device).transpose(1, 2)


def _without_autocast(call: BoundCall, request: AttentionRequest) -> BoundCall:
    """The dtype of query is the dtype of the answer; autocast would change it inside a kernel's own operators."""
    if not torch._C._is_any_autocast_enabled():
        return call

    def run(*arguments: object, **tensors: object) -> AttentionResult:
        with torch.autocast(request.device.type, enabled=False):
            return call(*arguments, **tensors)

    return run


def _validated(
    call: BoundCall, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, **tensors: Tensor
) -> AttentionResult:
    sequences.check_against_device()
    return call(query, key, value, sequences, **tensors)


def _check_empty(sequences: PackedSequences, selection: Selection, settings: environment.Settings) -> None:
    if not sequences.empty:
        return
    policy = settings.empty_sequences
    by_platform = policy == "platform" and selection.platform.rejects_empty_sequences
    if policy != "reject" and not by_platform:
        return
    index = sequences.empty[0]
    more = f" (and {len(sequences.empty) - 1} more)" if len(sequences.empty) > 1 else ""
    rule = f"the platform {selection.platform.name}" if by_platform else "HAL_ATTN_EMPTY_SEQUENCES=reject"
    raise InvalidAttentionInputError(
        "cu_seqlens",
        f"sequence {index} with {sequences.lengths[index]} queries and {sequences.lengths_k[index]} keys{more}",
        f"by {rule}, only sequences with queries and keys",
        "HAL_ATTN_EMPTY_SEQUENCES=compact answers it exactly; PackedSequences.without_empty() leaves out what is empty "
        "on both sides",
    )
