"""From a request to the call that answers it: made once for each kind of call, kept, and run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from hal_attn import settings as environment
from hal_attn.backend import AttentionBackend, AttentionResult
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.native import native_call
from hal_attn.packing import PackedSequences
from hal_attn.padded import attached, empty_lse, plan_maker, run_plan
from hal_attn.registry import Registry
from hal_attn.request import AttentionRequest, tensor_options
from hal_attn.selection import Selection, explicit_names, require, select
from hal_attn.tuning.choice import tuned
from hal_attn.tuning.measuring import Trial
from hal_attn.validation import dense_request, packed_request

_log = logging.getLogger("hal_attn")

BoundCall = Callable[..., AttentionResult]


def bind_dense(
    registry: Registry, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, object], backend: object
) -> BoundCall:
    """The call that answers batched calls like this one: `call(query, key, value, **tensor_options)`."""
    request = dense_request(query, key, value, options)
    tensors = tensor_options(options)
    call_of, trial = _trial(request, (query, key, value), None, tensors)
    selection, settings = _choose(registry, request, None, backend, trial)
    chosen = require(selection, registry, settings)
    return partial(_answer_without_keys, request) if trial is None else call_of(chosen)


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
    request = packed_request(query, key, value, sequences, options)
    tensors = tensor_options(options)
    reads = sequences.cu_seqlens_host is None and _rejects_empty(registry, request)
    known = _on_host(sequences, query, key) if reads else sequences
    call_of, trial = _trial(request, (query, key, value), known, tensors)
    selection, settings = _choose(registry, request, known, backend, trial)
    call = call_of(require(selection, registry, settings))
    if reads:
        call = partial(_read_first, call, selection, settings)
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
    measure: bool = False,
) -> Selection:
    """The selection of the call that these arguments would make. With `measure` it measures what that call would; for
    that, tensors may be shapes without memory of their own."""
    if sequences is None:
        request = dense_request(query, key, value, options)
    else:
        request = packed_request(query, key, value, sequences, options)
    trial = None
    if measure:
        _, trial = _trial(request, (query, key, value), sequences, tensor_options(options))
    return _selection(registry, request, sequences, backend, environment.read(), trial)


def _trial(
    request: AttentionRequest,
    tensors: tuple[Tensor, Tensor, Tensor],
    sequences: PackedSequences | None,
    options: dict[str, Tensor],
) -> tuple[Callable[[AttentionBackend], BoundCall], Trial | None]:
    """The call of a backend, and what backends may be measured with; None for a call without queries or keys."""

    def call_of(backend: AttentionBackend) -> BoundCall:
        if sequences is None:
            made = _dense_call(backend, request, bool(options))
        else:
            made = _packed_call(backend, request, sequences.cu_seqlens_host is not None)
        return _without_autocast(made, request)

    if not (request.tokens_q and request.tokens_k):
        return call_of, None
    # Plans that losers make are kept with sequences of their own, and go with them.
    rest = () if sequences is None else (replace(sequences, _memo={}),)
    return call_of, Trial(call_of, tensors, rest, options)


def _choose(
    registry: Registry,
    request: AttentionRequest,
    sequences: PackedSequences | None,
    backend: object,
    trial: Trial | None,
) -> tuple[Selection, environment.Settings]:
    """The selection for a call, and the settings that it was made under."""
    settings = environment.read()
    environment.apply_log_level(settings)
    selection = _selection(registry, request, sequences, backend, settings, trial)
    if selection.chosen is not None:
        _log.info("%s, by %s, for %s", selection.chosen.name, selection.source, request.describe())
    return selection, settings


def _selection(
    registry: Registry,
    request: AttentionRequest,
    sequences: PackedSequences | None,
    backend: object,
    settings: environment.Settings,
    trial: Trial | None,
) -> Selection:
    explicit = explicit_names(backend, settings)
    selection = select(request, registry, settings, explicit)
    if sequences is not None:
        _check_empty(sequences, selection, settings)
    return tuned(selection, registry, settings, explicit, trial)


def _dense_call(backend: AttentionBackend, request: AttentionRequest, with_tensors: bool) -> BoundCall:
    short = None if with_tensors else backend.bind(request)
    return short if short is not None else partial(backend.unchecked("forward"), **request.options())


def _packed_call(backend: AttentionBackend, request: AttentionRequest, known: bool) -> BoundCall:
    """`known`: the host knows the lengths; offsets that only the device knows go to a kernel that reads them."""
    if backend.implements("forward_varlen"):
        native = native_call(backend, request)
        batched = backend.bind(request) if known and _batched_is_better(backend, request) else None
        return native if batched is None else _over_views(batched, request, native)
    options, plan_of, short = request.options(), plan_maker(backend, request), backend.bind(request)
    # Bound for the longest lengths, it serves others only where no query can be without keys.
    of_buckets = short if request.equal_lengths and not request.return_lse else None

    def run(
        query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, **tensors: Tensor
    ) -> AttentionResult:
        quick = None if tensors else of_buckets
        return run_plan(backend, plan_of(sequences), query, key, value, {**options, **tensors}, quick)

    return run if short is None else _over_views(short, request, run)


def _batched_is_better(backend: AttentionBackend, request: AttentionRequest) -> bool:
    if not (request.uniform and backend.implements("forward") and backend.prefers_batched(request)):
        return False
    return not backend.refusals(replace(request, packed=False))


def _over_views(short: BoundCall, request: AttentionRequest, general: BoundCall) -> BoundCall:
    """`general`, but with one call of `short` over views where all sequences have the same lengths.

    Every sequence list that this is bound for has them. What it costs beyond that one call is what a caller with tiny
    inputs sees.
    """
    count, length_q, length_k, with_lse = request.batch, request.seqlen_q, request.seqlen_k, request.return_lse
    if not (request.uniform and length_q and length_k):
        return general
    if (count * length_q, count * length_k) != (request.tokens_q, request.tokens_k):
        return general

    def run(
        query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, **tensors: Tensor
    ) -> AttentionResult:
        if tensors:
            return general(query, key, value, sequences, **tensors)
        if count == 1:
            result = short(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0))
            if not with_lse:
                return cast(Tensor, result).squeeze(0)
            return result[0].squeeze(0), result[1].squeeze(0)
        batch = (tensor.unflatten(0, (count, -1)) for tensor in (query, key, value))
        result = short(*batch)
        if not with_lse:
            return cast(Tensor, result).flatten(0, 1)
        output, lse = result
        return output.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    return run


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


def _rejects_empty(registry: Registry, request: AttentionRequest) -> bool:
    return registry.platform_for(request.device, environment.read()).rejects_empty_sequences


def _read_first(
    call: BoundCall,
    selection: Selection,
    settings: environment.Settings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    **tensors: Tensor,
) -> AttentionResult:
    """`call` where the platform rejects empty sequences and only the device knows the lengths.

    A bound call serves other sequences with the same signature, which does not know which of them are empty.
    """
    known = _on_host(sequences, query, key)
    _check_empty(known, selection, settings)
    return call(query, key, value, known, **tensors)


def _on_host(sequences: PackedSequences, query: Tensor, key: Tensor) -> PackedSequences:
    """The same sequences with their lengths on the host; waits for the device once a batch."""
    known = sequences.memo("on host", partial(_read, sequences))
    known.check_tensors(query, key)
    return known


def _read(sequences: PackedSequences) -> PackedSequences:
    offsets_k = None if sequences.equal_lengths else sequences.cu_seqlens_k
    names = ("cu_seqlens_host", "cu_seqlens_k_host")
    known = PackedSequences.checked(sequences.cu_seqlens, offsets_k, None, None, names, sequences.source)
    for name, bound, have in (
        ("max_seqlen", sequences.max_seqlen, known.max_seqlen),
        ("max_seqlen_k", sequences.max_seqlen_k, known.max_seqlen_k),
    ):
        if bound < have:
            raise InvalidAttentionInputError(name, str(bound), f"at least the longest sequence, {have}, or None")
    return known


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
