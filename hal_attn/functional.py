"""`attention` and `varlen_attention`: the key of a call finds the call that was bound for it, or binds one.

`hal_attn.memo` says what a key holds: all that a bound call was made from, so that a hit needs no checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.compiler import is_compiling

from hal_attn import compiled
from hal_attn.backend import AttentionBackend, AttentionResult
from hal_attn.binding import explain_call
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.memo import PLAIN, bound_call
from hal_attn.packing import PackedSequences, check_offsets
from hal_attn.registry import default_registry
from hal_attn.request import TENSOR_OPTIONS
from hal_attn.selection import Selection, require
from hal_attn.settings import read

Window = tuple[int | None, int | None] | None
HostOffsets = Sequence[int] | Tensor | None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: Window = None,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | Sequence[str] | None = None,
) -> AttentionResult:
    """Attention over a batch, on the best backend for it.

    Args:
        query: `[B, Sq, H, D]`.
        key: `[B, Sk, Hkv, D]`; query head `h` reads key head `h // (H // Hkv)`.
        value: `[B, Sk, Hkv, Dv]`.
        scale: factor on the scores; None is `1/sqrt(D)`, 0.0 is a value.
        causal: query `i` sees keys `j <= i + Sk - Sq`.
        window_size: `(left, right)`: `i + Sk - Sq - left <= j <= i + Sk - Sq + right`; -1 or None is unlimited.
        mask: broadcastable to `[B, H, Sq, Sk]`; bool, True = may attend, or float, added to the scores, -inf hides.
        key_padding_mask: `[B, Sk]` bool, True = a real key.
        softcap: `c * tanh(scores / c)` where above 0.
        sinks: `[H]`, one more logit a head in the denominator, without a value.
        alibi_slopes: `[H]` or `[B, H]`; adds `-slope * |i + Sk - Sq - j|`.
        dropout_p: the probability of dropping a weight.
        deterministic: bitwise equal results on repeat, or a refusal.
        return_lse: also return the LSE.
        backend: a backend's name, or names in order; overrides `use_backend` and HAL_ATTN_BACKEND.

    Returns:
        `[B, Sq, H, Dv]` in the dtype of query; with `return_lse` also the LSE `[B, H, Sq]`, float32, natural log. A
        query that sees no key has output 0 and LSE -inf (or its head's sink).

    Raises:
        InvalidAttentionInputError: an argument is wrong.
        UnsupportedAttentionError: no backend here takes the call; it has every reason.
        BackendNotAvailableError: the backend named is missing or broken.
        ConfigurationError: an environment variable is wrong.
    """
    if is_compiling():
        options = (scale, causal, window_size, softcap, dropout_p, deterministic, return_lse, backend)
        return compiled.attention(query, key, value, (mask, key_padding_mask, sinks, alibi_slopes), options)
    given = None
    if not (mask is None and key_padding_mask is None and sinks is None and alibi_slopes is None):
        given = _given(mask=mask, key_padding_mask=key_padding_mask, sinks=sinks, alibi_slopes=alibi_slopes)
    plain = (scale, causal, softcap, dropout_p, deterministic, return_lse)
    call = bound_call(query, key, value, plain, window_size, backend, given)
    return call(query, key, value) if given is None else call(query, key, value, **given)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_host: HostOffsets = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    cu_seqlens_k_host: HostOffsets = None,
    sequences: PackedSequences | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_size: Window = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | Sequence[str] | None = None,
) -> AttentionResult:
    """Attention over packed sequences that never see each other, on the best backend for them.

    Args:
        query: `[Tq, H, D]`; key: `[Tk, Hkv, D]`; value: `[Tk, Hkv, Dv]`.
        cu_seqlens: offsets of the queries, 1-D integers: 0, then each sequence's end; the last is Tq.
        max_seqlen: the longest query length, or more; derived where it is not given.
        cu_seqlens_host: the same offsets on the host. With them nothing waits for the device.
        cu_seqlens_k, max_seqlen_k, cu_seqlens_k_host: the same for keys, where they are packed otherwise than queries.
        sequences: one `PackedSequences` instead of all of these; made once for each batch, shared by its layers.

    The other options, the returns and the errors are those of `attention`; the LSE is `[H, Tq]`. A sequence without
    keys gives output 0 and LSE -inf, unless HAL_ATTN_EMPTY_SEQUENCES or the platform rejects it.
    """
    if is_compiling():
        offsets = (cu_seqlens, max_seqlen, cu_seqlens_host, cu_seqlens_k, max_seqlen_k, cu_seqlens_k_host)
        options = (scale, causal, window_size, softcap, dropout_p, deterministic, return_lse, backend)
        return compiled.varlen_attention(query, key, value, sequences, offsets, (sinks, alibi_slopes), options)
    if sequences is None:
        sequences = _sequences(
            query, (cu_seqlens, max_seqlen, cu_seqlens_host), (cu_seqlens_k, max_seqlen_k, cu_seqlens_k_host)
        )
    elif (
        sequences.__class__ is not PackedSequences
        or not (cu_seqlens is None and max_seqlen is None and cu_seqlens_host is None)
        or not (cu_seqlens_k is None and max_seqlen_k is None and cu_seqlens_k_host is None)
    ):
        _check_only_sequences(
            sequences,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            cu_seqlens_host=cu_seqlens_host,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_k=max_seqlen_k,
            cu_seqlens_k_host=cu_seqlens_k_host,
        )
    given = None if sinks is None and alibi_slopes is None else _given(sinks=sinks, alibi_slopes=alibi_slopes)
    plain = (scale, causal, softcap, dropout_p, deterministic, return_lse)
    call = bound_call(query, key, value, plain, window_size, backend, given, sequences)
    return call(query, key, value, sequences) if given is None else call(query, key, value, sequences, **given)


def explain(query: Tensor, key: Tensor, value: Tensor, **same_options: object) -> Selection:
    """The selection that `attention` (or, for packed tensors, `varlen_attention`) would make with the same arguments:
    `.chosen`, `.source`, `.considered` as (backend, refusals); `str()` is a table. Nothing is computed or measured.

    Raises:
        InvalidAttentionInputError, ConfigurationError: as the call itself would.
    """
    options = dict(same_options)
    backend = options.pop("backend", None)
    packed = {name: options.pop(name) for name in _PACKED_OPTIONS if name in options}
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise InvalidAttentionInputError(unknown[0], "an unknown option", ", ".join((*_OPTIONS, *_PACKED_OPTIONS)))
    sequences: PackedSequences | None = None
    if any(value is not None for value in packed.values()):
        given = packed.pop("sequences", None)
        if given is None:
            queries = tuple(packed.get(name) for name in ("cu_seqlens", "max_seqlen", "cu_seqlens_host"))
            keys = tuple(packed.get(name) for name in ("cu_seqlens_k", "max_seqlen_k", "cu_seqlens_k_host"))
            sequences = _sequences(query, queries, keys)  # type: ignore[arg-type]
        else:
            _check_only_sequences(given, **packed)
            assert isinstance(given, PackedSequences)
            sequences = given
        for name in ("mask", "key_padding_mask"):
            if options.get(name) is not None:
                raise InvalidAttentionInputError(name, "given for packed sequences", "None", "sequences take its place")
    return explain_call(default_registry(), query, key, value, sequences, options, backend)


def select_backend(query: Tensor, key: Tensor, value: Tensor, **same_options: object) -> AttentionBackend:
    """The backend that `attention` or `varlen_attention` would run with the same arguments; raises as they would."""
    return require(explain(query, key, value, **same_options), default_registry(), read())


_OPTIONS = (*PLAIN, "window_size", *TENSOR_OPTIONS)
_PACKED_OPTIONS = (
    "cu_seqlens",
    "max_seqlen",
    "cu_seqlens_host",
    "cu_seqlens_k",
    "max_seqlen_k",
    "cu_seqlens_k_host",
    "sequences",
)


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _check_only_sequences(sequences: object, **others: object) -> None:
    if not isinstance(sequences, PackedSequences):
        raise InvalidAttentionInputError(
            "sequences", f"a {type(sequences).__name__}", "a PackedSequences", "PackedSequences.from_lengths(lengths)"
        )
    for name, value in others.items():
        if value is not None:
            raise InvalidAttentionInputError(name, "given beside sequences", "None", "sequences holds the offsets")


def _sequences(
    query: Tensor,
    queries: tuple[Tensor | None, int | None, HostOffsets],
    keys: tuple[Tensor | None, int | None, HostOffsets],
) -> PackedSequences:
    """The sequences of a call that gives offsets; waits for the device only without a host copy and a maximum."""
    if queries[0] is None:
        raise InvalidAttentionInputError("cu_seqlens", "None", "offsets, or sequences=PackedSequences")
    if keys[0] is None and not (keys[1] is None and keys[2] is None):
        name = "max_seqlen_k" if keys[1] is not None else "cu_seqlens_k_host"
        raise InvalidAttentionInputError(name, "given", "None unless cu_seqlens_k is given")
    offsets = check_offsets("cu_seqlens", queries[0])
    offsets_k = offsets if keys[0] is None else check_offsets("cu_seqlens_k", keys[0])
    if isinstance(query, Tensor):
        for name, tensor in (("cu_seqlens", offsets), ("cu_seqlens_k", offsets_k)):
            if tensor.device != query.device:
                raise InvalidAttentionInputError(
                    name,
                    f"device {tensor.device}",
                    f"the device of query, {query.device}",
                    "a copy on the host goes in cu_seqlens_host, beside it",
                )
    longest = _check_max("max_seqlen", queries[1])
    longest_k = longest if keys[0] is None else _check_max("max_seqlen_k", keys[1])
    on_host = offsets.device.type == "cpu" or (queries[2] is not None and (keys[0] is None or keys[2] is not None))
    if not on_host and longest is not None and longest_k is not None:
        return PackedSequences.from_device_offsets(offsets, offsets_k, longest, longest_k)
    given = (
        "cu_seqlens" if queries[2] is None else "cu_seqlens_host",
        "cu_seqlens_k" if keys[2] is None else "cu_seqlens_k_host",
    )
    made = PackedSequences.checked(
        queries[0], keys[0], queries[2], keys[2], names=("cu_seqlens_host", "cu_seqlens_k_host"), source=given
    )
    for name, bound, have in (("max_seqlen", longest, made.max_seqlen), ("max_seqlen_k", longest_k, made.max_seqlen_k)):
        if bound is not None and bound < have:
            raise InvalidAttentionInputError(name, str(bound), f"at least the longest sequence, {have}, or None")
    return made


def _check_max(name: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 0 and not value.is_floating_point():
        return int(value)
    got = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
    raise InvalidAttentionInputError(name, got, "a whole number of at least 0, on the host", "int(...) reads a tensor")
