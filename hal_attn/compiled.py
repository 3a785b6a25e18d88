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
from hal_attn.kinds import DENSE, PACKED, Fault, fault_of_call, fault_of_offsets
from hal_attn.packing import PackedSequences

_PLAIN = ("scale", "causal", "window_size", "softcap", "dropout_p", "deterministic", "return_lse", "backend")
_OFFSETS = ("cu_seqlens", "max_seqlen", "cu_seqlens_host", "cu_seqlens_k", "max_seqlen_k", "cu_seqlens_k_host")


def attention(
    query: Tensor, key: Tensor, value: Tensor, given: tuple[Tensor | None, ...], plain: tuple[Any, ...]
) -> AttentionResult:
    """`hal_attn.attention` as an operator; `given`: mask, key_padding_mask, sinks, alibi_slopes; `plain`: `_PLAIN`."""
    mask, key_padding_mask, sinks, alibi_slopes = given
    options = dict(zip(_PLAIN, plain, strict=True))
    tensors = {"mask": mask, "key_padding_mask": key_padding_mask, "sinks": sinks, "alibi_slopes": alibi_slopes}
    fault = fault_of_call((query, key, value), DENSE, {**options, **tensors})
    if fault is not None:
        return refused(query, value, options, fault)
    wanting = (query, key, value, mask, sinks, alibi_slopes)
    result = torch.ops.hal_attn.attention(*wanting, key_padding_mask, *_plain(options), wanted(wanting))
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
    """`hal_attn.varlen_attention` as an operator; `offsets`: `_OFFSETS`; `given`: sinks, alibi_slopes."""
    sinks, alibi_slopes = given
    options = dict(zip(_PLAIN, plain, strict=True))
    tensors = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    places = dict(zip(_OFFSETS, offsets, strict=True))
    fault = fault_of_call((query, key, value), PACKED, {**options, **tensors}) or fault_of_offsets(sequences, places)
    if fault is not None:
        return refused(query, value, options, fault)
    wanting = (query, key, value, sinks, alibi_slopes)
    result = torch.ops.hal_attn.varlen_attention(
        *wanting, *_where(sequences, places), *_plain(options), wanted(wanting)
    )
    return (result[0], result[1]) if options["return_lse"] else result[0]


def _where(sequences: PackedSequences | None, offsets: dict[str, Any]) -> tuple[Any, ...]:
    """Where the sequences lie, as the operator takes it."""
    carrier = None if sequences is None else sequences.carrier
    if sequences is not None and carrier is None:
        # Made while tracing, from lengths: those are numbers of the program.
        keys = None if sequences.equal_lengths else sequences.cu_seqlens_k_host
        offsets = {**offsets, "cu_seqlens_host": sequences.cu_seqlens_host, "cu_seqlens_k_host": keys}
    parts = [carrier, offsets["cu_seqlens"], offsets["cu_seqlens_k"]]
    for name in ("cu_seqlens_host", "cu_seqlens_k_host", "max_seqlen", "max_seqlen_k"):
        value = offsets[name]
        # Numbers of the host, or a tensor of them.
        parts += [None, value] if isinstance(value, Tensor) else [value, None]
    return tuple(parts)


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
        [backend] if isinstance(backend, str) else backend,
    )


def wanted(tensors: Sequence[Tensor | None]) -> list[bool]:
    """Which of the tensors want a gradient."""
    wants = torch.is_grad_enabled()
    return [wants and tensor is not None and tensor.requires_grad for tensor in tensors]


def refused(query: object, value: object, options: dict[str, Any], fault: Fault) -> AttentionResult:
    """A fault as an operator, which raises it when the program runs: an error while tracing would be the tracer's."""
    both = isinstance(query, Tensor) and isinstance(value, Tensor)
    lse = options["return_lse"] is True
    result = torch.ops.hal_attn.refuse(query if both else None, value if both else None, lse, *fault)
    return (result[0], result[1]) if lse else result[0]
