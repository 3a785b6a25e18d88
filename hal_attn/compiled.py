"""The calls while a program is traced: their arguments, sorted for the operators that the compiled program will hold.

A tracer runs what is here, so it is plain: nothing reads a value of a tensor, and nothing looks at a length. What it
decides at once is whether gradients are wanted, and the kinds of the arguments; everything else the call decides when
it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal_attn.backend import AttentionResult
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.packing import PackedSequences, check_offsets, host_offsets
from hal_attn.selection import argument_names
from hal_attn.validation import check_kinds

_PLAIN = ("scale", "causal", "window_size", "softcap", "dropout_p", "deterministic", "return_lse", "backend")
_OFFSETS = ("cu_seqlens", "max_seqlen", "cu_seqlens_host", "cu_seqlens_k", "max_seqlen_k", "cu_seqlens_k_host")


def attention(
    query: Tensor, key: Tensor, value: Tensor, given: tuple[Tensor | None, ...], plain: tuple[Any, ...]
) -> AttentionResult:
    """`hal_attn.attention` as an operator. `given`: mask, key_padding_mask, sinks, alibi_slopes; `plain`: as `_PLAIN`."""
    mask, key_padding_mask, sinks, alibi_slopes = given
    options = dict(zip(_PLAIN, plain, strict=True))
    tensors = {"mask": mask, "key_padding_mask": key_padding_mask, "sinks": sinks, "alibi_slopes": alibi_slopes}
    try:
        check_kinds((query, key, value), False, {**options, **tensors})
        numbers = _plain(options)
    except InvalidAttentionInputError as error:
        return _refused(query, value, options, error.parts)
    wanting = (query, key, value, mask, sinks, alibi_slopes)
    result = torch.ops.hal_attn.attention(*wanting, key_padding_mask, *numbers, _wanted(wanting))
    return (result[0], result[1]) if options["return_lse"] else result[0]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences | None,
    offsets: tuple[Any, ...],
    given: tuple[Tensor | None, Tensor | None],
    plain: tuple[Any, ...],
) -> AttentionResult:
    """`hal_attn.varlen_attention` as an operator. `offsets`: as `_OFFSETS`; `given`: sinks, alibi_slopes; `plain`: as
    `_PLAIN`."""
    sinks, alibi_slopes = given
    options = dict(zip(_PLAIN, plain, strict=True))
    try:
        check_kinds((query, key, value), True, {**options, "sinks": sinks, "alibi_slopes": alibi_slopes})
        numbers = _plain(options)
        where = _where(sequences, dict(zip(_OFFSETS, offsets, strict=True)))
    except InvalidAttentionInputError as error:
        return _refused(query, value, options, error.parts)
    wanting = (query, key, value, sinks, alibi_slopes)
    result = torch.ops.hal_attn.varlen_attention(*wanting, *where, *numbers, _wanted(wanting))
    return (result[0], result[1]) if options["return_lse"] else result[0]


def _where(sequences: PackedSequences | None, offsets: dict[str, Any]) -> tuple[Any, ...]:
    """Where the sequences lie, as the operator takes it."""
    carrier = None
    if sequences is not None:
        if not isinstance(sequences, PackedSequences):
            remedy = "PackedSequences.from_lengths(lengths)"
            raise InvalidAttentionInputError(
                "sequences", f"a {type(sequences).__name__}", "a PackedSequences", remedy
            )
        carrier = sequences.carrier
        if carrier is None:
            # Made while tracing, from lengths: those are numbers of the program.
            keys = None if sequences.equal_lengths else sequences.cu_seqlens_k_host
            offsets = {**offsets, "cu_seqlens_host": sequences.cu_seqlens_host, "cu_seqlens_k_host": keys}
    for name in ("cu_seqlens", "cu_seqlens_k"):
        if offsets[name] is not None and not isinstance(offsets[name], Tensor):
            check_offsets(name, offsets[name])
    hosts = [_host(name, offsets[name]) for name in ("cu_seqlens_host", "cu_seqlens_k_host")]
    longest = [_longest(name, offsets[name]) for name in ("max_seqlen", "max_seqlen_k")]
    return (carrier, offsets["cu_seqlens"], offsets["cu_seqlens_k"], *hosts[0], *hosts[1], *longest[0], *longest[1])


def _host(name: str, value: Any) -> tuple[list[int] | None, Tensor | None]:
    """(offsets as numbers, None), or (None, a tensor of them)."""
    if value is None or isinstance(value, Tensor):
        return None, value
    if not isinstance(value, (tuple, list)) or not all(_whole(number) for number in value):
        value = host_offsets(name, value)
    return list(value), None


def _longest(name: str, value: Any) -> tuple[int | None, Tensor | None]:
    """(a length, None), or (None, a tensor of it)."""
    if value is None or isinstance(value, Tensor):
        return None, value
    if not _whole(value):
        raise InvalidAttentionInputError(name, repr(value), "a whole number of at least 0, on the host")
    return value, None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(options: dict[str, Any]) -> tuple[Any, ...]:
    """The plain options, in the order of the operators."""
    window, backend = options["window_size"], options["backend"]
    left, right = (-1, -1) if window is None else window
    return (
        options["scale"],
        options["causal"],
        -1 if left is None else left,
        -1 if right is None else right,
        options["softcap"],
        options["dropout_p"],
        options["deterministic"],
        options["return_lse"],
        None if backend is None else list(argument_names(backend)),
    )


def _wanted(tensors: Sequence[Tensor | None]) -> list[bool]:
    """Which of the tensors want a gradient."""
    wants = torch.is_grad_enabled()
    return [wants and tensor is not None and tensor.requires_grad for tensor in tensors]


def _refused(query: object, value: object, options: dict[str, Any], parts: tuple[str, ...]) -> AttentionResult:
    """An error as an operator, which raises it when the program runs: raised while tracing, it would be the tracer's."""
    both = isinstance(query, Tensor) and isinstance(value, Tensor)
    lse = options["return_lse"] is True
    result = torch.ops.hal_attn.refuse(query if both else None, value if both else None, lse, *parts)
    return (result[0], result[1]) if lse else result[0]
