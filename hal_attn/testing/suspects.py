"""Known mistakes of attention backends, each as the answer that it gives; a wrong result that equals one has a name.

A mistake is made in the inputs of the float64 oracle, one sequence at a time, or in the LSE that comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal_attn.reference import reference_attention
from hal_attn.testing.problem import Problem
from hal_attn.testing.tensors import Tensors

Options = dict[str, Any]
Inputs = tuple[Tensors, Options]
Attend = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Suspect:
    """One mistake.

    Attributes:
        text: what the result looks like, as the end of a sentence.
        rule: the rule that it breaks, of `RULES`.
        answer: (output, LSE) that it gives for a call, in float64.
    """

    text: str
    rule: str
    answer: Callable[[Problem], tuple[Tensor, Tensor]]


RULE_OF = {
    "scale": "scale",
    "causal": "visible keys",
    "window_size": "visible keys",
    "mask": "masks",
    "key_padding_mask": "masks",
    "softcap": "softcap",
    "sinks": "sinks",
    "alibi_slopes": "bias",
}


def suspects(problem: Problem) -> Iterator[Suspect]:
    """The mistakes that could show in this call, the likeliest first."""
    for name, value in problem.options.items():
        if name in RULE_OF and value is not None and value is not False:
            yield Suspect(f"{name} is ignored", RULE_OF[name], _with(problem, _dropped(name)))
    yield from _of_scale(problem)
    yield from _of_visibility(problem)
    yield from _of_masks(problem)
    yield from _of_options(problem)
    yield from _of_heads(problem)
    yield from _of_packing(problem)
    yield from _of_sums(problem)


def _of_scale(problem: Problem) -> Iterator[Suspect]:
    if problem.options.get("scale") is not None:
        yield Suspect("scale is used twice", "scale", _with(problem, _scaled(lambda scale, dim: scale / dim**0.5)))
        return
    yield Suspect("the scale is 1 where none is given", "scale", _with(problem, _scaled(lambda scale, dim: 1.0)))
    for multiple in (8, 16, 32, 64, 128):
        padded = -(-problem.query.shape[-1] // multiple) * multiple
        if padded != problem.query.shape[-1]:
            text = f"the scale is that of a head dim padded to {padded}"
            yield Suspect(text, "scale", _with(problem, _scaled(lambda scale, dim, padded=padded: padded**-0.5)))  # type: ignore[misc]
    dims = problem.query.shape[-1], problem.value.shape[-1]
    if dims[0] != dims[1]:
        text = "the scale is that of the head dim of value"
        yield Suspect(text, "scale", _with(problem, _scaled(lambda scale, dim: dims[1] ** -0.5)))


def _of_visibility(problem: Problem) -> Iterator[Suspect]:
    causal, window = problem.options.get("causal"), problem.options.get("window_size")
    if causal or window:
        yield Suspect("the band hangs from the top left", "visible keys", _with(problem, _top_left))
    if causal:
        yield Suspect("causal hides the query's own key", "visible keys", _with(problem, _banded(-1, -1, shift=-1)))
        yield Suspect("causal shows one key too many", "visible keys", _with(problem, _banded(-1, 1)))
    if not window:
        return
    left, right = (-1 if edge is None else edge for edge in window)
    right = 0 if causal else right
    moves = {
        "left edge is one too small": (left - 1, right) if left > 0 else None,
        "left edge is one too large": (left + 1, right) if left >= 0 else None,
        "right edge is one too small": (left, right - 1) if right > 0 else None,
        "right edge is one too large": (left, right + 1) if right >= 0 else None,
        "edges are both one too small": (left - 1, right - 1) if min(left, right) > 0 else None,
        "edges are both one too large": (left + 1, right + 1) if min(left, right) >= 0 else None,
        "left and right are swapped": (right, left) if left != right else None,
        "left edge is ignored": (-1, right) if left >= 0 else None,
        "right edge is ignored": (left, -1) if right >= 0 else None,
    }
    for name, edges in moves.items():
        if edges is not None:
            yield Suspect(f"the window's {name}", "visible keys", _with(problem, _banded(*edges)))


def _of_masks(problem: Problem) -> Iterator[Suspect]:
    mask, padding = problem.options.get("mask"), problem.options.get("key_padding_mask")
    if mask is not None and mask.dtype == torch.bool:
        yield Suspect("the bool mask is inverted: True hides", "masks", _with(problem, _inverted("mask")))
        yield Suspect("the bool mask is added as a number", "masks", _with(problem, _changed(mask=mask.double())))
    if mask is not None and mask.is_floating_point():
        negative = torch.where(torch.isneginf(mask), mask, -mask)
        yield Suspect("the float mask is subtracted", "bias", _with(problem, _changed(mask=negative)))
        yield Suspect("the float mask is added before the scale", "bias", _with(problem, _bias_scaled))
    if padding is not None:
        yield Suspect(
            "the padding mask is inverted: True hides", "masks", _with(problem, _inverted("key_padding_mask"))
        )


def _of_options(problem: Problem) -> Iterator[Suspect]:
    slopes = problem.options.get("alibi_slopes")
    if slopes is not None:
        yield Suspect("ALiBi is added, not subtracted", "bias", _with(problem, _changed(alibi_slopes=-slopes)))
        yield Suspect("ALiBi counts places from the top left", "bias", _with(problem, _alibi_top_left))
    if problem.options.get("softcap"):
        yield Suspect("softcap comes before the scale", "softcap", _with(problem, _cap_before_scale))
    sinks = problem.options.get("sinks")
    if sinks is not None:
        yield Suspect("sinks are exponentiated already", "sinks", _with(problem, _changed(sinks=sinks.exp())))


def _of_heads(problem: Problem) -> Iterator[Suspect]:
    heads, kv_heads = problem.query.shape[-2], problem.key.shape[-2]
    if kv_heads not in (1, heads):
        by_remainder = [head % kv_heads for head in range(heads)]
        yield Suspect("query head h reads key head h % Hkv", "heads", _with(problem, _key_heads(by_remainder)))
        yield Suspect("every query head reads key head 0", "heads", _with(problem, _key_heads([0] * heads)))
    if heads > 1:
        backwards = [(heads - 1 - head) // (heads // kv_heads) for head in range(heads)]
        yield Suspect("the heads are read in another order", "heads", _with(problem, _key_heads(backwards)))


def _of_packing(problem: Problem) -> Iterator[Suspect]:
    if problem.sequences is None:
        return
    yield Suspect("a sequence sees the keys of the next one", "packed", lambda given: _leaking(given, 0, 1))
    yield Suspect("a sequence sees the keys of the one before", "packed", lambda given: _leaking(given, 1, 0))
    for text, before, after in (
        ("a sequence sees the first key of the next one", 0, 1),
        ("a sequence sees the last key of the one before", 1, 0),
        ("a sequence misses its last key", 0, -1),
        ("a sequence misses its first key", -1, 0),
    ):
        yield Suspect(text, "packed", partial(_offsets_off, before=before, after=after))
    everything = problem.sequences.count
    yield Suspect("sequences see each other", "packed", lambda given: _leaking(given, everything, everything))
    if not problem.sequences.equal_lengths:
        yield Suspect("key offsets are taken from the queries", "packed", _keys_by_query_offsets)


def _of_sums(problem: Problem) -> Iterator[Suspect]:
    dtype = problem.query.dtype
    if dtype in (torch.float16, torch.bfloat16):
        for keys in (1, 16, 32, 64, 128):
            text = f"sums over the keys are kept in {str(dtype).removeprefix('torch.')}"
            yield Suspect(text, "precision", _with(problem, lambda *given: given, partial(_summed, dtype, keys)))


def lse_suspects(lse: Tensor, problem: Problem) -> Iterator[tuple[str, Tensor]]:
    """(what it looks like, the LSE that it gives) for an output that is right; `lse` is the right one."""
    yield "the LSE is in base 2", lse / math.log(2)
    yield "the LSE is in base 10", lse / math.log(10)
    yield "the LSE has the wrong sign", -lse
    yield "the LSE is the sum, not its logarithm", lse.exp()
    if problem.options.get("sinks") is not None:
        yield "the LSE lacks the sink", _with(problem, _dropped("sinks"))(problem)[1]
    if problem.options.get("scale") is not None:
        yield "the LSE lacks the scale", _with(problem, _dropped("scale"))(problem)[1]


def _with(
    problem: Problem, change: Callable[[Tensors, Options], Inputs], attend: Attend = reference_attention
) -> Callable[[Problem], tuple[Tensor, Tensor]]:
    """The oracle over inputs that `change` made wrong, one batch or one sequence at a time."""

    def answer(given: Problem) -> tuple[Tensor, Tensor]:
        query, key, value = (tensor.detach().double() for tensor in given.laid_out())
        if given.sequences is None:
            wrong, options = change((query, key, value), dict(given.options))
            return attend(*wrong, **options)
        outputs, lses = [], []
        for parts, options in _sequences(given, (query, key, value)):
            wrong, options = change(parts, options)
            output, lse = attend(*wrong, **options)
            outputs.append(output[0])
            lses.append(lse[0])
        return torch.cat(outputs), torch.cat(lses, 1)

    return answer


def _summed(
    dtype: torch.dtype, keys: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Right weights, whose products with the values are added up in `dtype`, so many keys at a time."""
    seqlen_k, kv_heads = key.shape[1:3]
    # With the unit vectors as values, the output is the weights.
    units = torch.eye(seqlen_k, dtype=torch.float64).expand(key.shape[0], kv_heads, seqlen_k, seqlen_k).transpose(1, 2)
    weights, lse = reference_attention(query, key, units, **options)
    values = value.repeat_interleave(query.shape[2] // kv_heads, 2)
    total = torch.zeros(*weights.shape[:3], value.shape[3], dtype=dtype)
    for first in range(0, seqlen_k, keys):
        part = slice(first, first + keys)
        total = total + torch.einsum("bqhk,bkhd->bqhd", weights[..., part], values[:, part]).to(dtype)
    return total.double(), lse


def _sequences(problem: Problem, tensors: Tensors) -> Iterator[Inputs]:
    assert problem.sequences is not None
    lengths = problem.sequences.lengths, problem.sequences.lengths_k, problem.sequences.lengths_k
    rows = (tensor.split(list(counts)) for tensor, counts in zip(tensors, lengths, strict=True))
    slopes = problem.options.get("alibi_slopes")
    for index, (query, key, value) in enumerate(zip(*rows, strict=True)):
        own = {} if slopes is None or slopes.dim() == 1 else {"alibi_slopes": slopes[index]}
        yield (query[None], key[None], value[None]), {**problem.options, **own}


def _dropped(name: str) -> Callable[[Tensors, Options], Inputs]:
    return lambda tensors, options: (tensors, {key: value for key, value in options.items() if key != name})


def _changed(**changes: Any) -> Callable[[Tensors, Options], Inputs]:
    return lambda tensors, options: (tensors, {**options, **changes})


def _scaled(change: Callable[[float, int], float]) -> Callable[[Tensors, Options], Inputs]:
    def wrong(tensors: Tensors, options: Options) -> Inputs:
        dim = tensors[0].shape[-1]
        return tensors, {**options, "scale": change(options.get("scale") or dim**-0.5, dim)}

    return wrong


def _inverted(name: str) -> Callable[[Tensors, Options], Inputs]:
    return lambda tensors, options: (tensors, {**options, name: ~options[name]})


def _bias_scaled(tensors: Tensors, options: Options) -> Inputs:
    scale = options.get("scale")
    scale = tensors[0].shape[-1] ** -0.5 if scale is None else scale
    mask = options["mask"]
    return tensors, {**options, "mask": torch.where(torch.isneginf(mask), mask, mask * scale)}


def _cap_before_scale(tensors: Tensors, options: Options) -> Inputs:
    # scale * c * tanh(q.k / c) is what a cap of scale * c gives on scale * q.k.
    scale = options.get("scale")
    scale = tensors[0].shape[-1] ** -0.5 if scale is None else scale
    return tensors, {**options, "softcap": options["softcap"] * scale}


def _alibi_top_left(tensors: Tensors, options: Options) -> Inputs:
    query, key, _ = tensors
    slopes = options["alibi_slopes"].double()
    distance = (torch.arange(query.shape[1])[:, None] - torch.arange(key.shape[1])).abs().double()
    bias = -slopes.reshape(-1, query.shape[2], 1, 1) * distance
    return tensors, {**_without(options, "alibi_slopes"), "mask": _joined_mask(options.get("mask"), bias)}


def _key_heads(order: list[int]) -> Callable[[Tensors, Options], Inputs]:
    return lambda tensors, options: ((tensors[0], tensors[1][:, :, order], tensors[2][:, :, order]), options)


def _banded(left: int, right: int, shift: int = 0) -> Callable[[Tensors, Options], Inputs]:
    """The band from `left` to `right` of the bottom-right diagonal, in the place of causal and window."""

    def wrong(tensors: Tensors, options: Options) -> Inputs:
        seqlen_q, seqlen_k = tensors[0].shape[1], tensors[1].shape[1]
        if shift:
            return tensors, _hidden(options, _band(seqlen_q, seqlen_k, -1, shift, seqlen_k - seqlen_q, exact=True))
        return tensors, _hidden(options, _band(seqlen_q, seqlen_k, left, right, seqlen_k - seqlen_q))

    return wrong


def _top_left(tensors: Tensors, options: Options) -> Inputs:
    left, right = (-1 if edge is None else edge for edge in options.get("window_size") or (-1, -1))
    right = 0 if options.get("causal") else right
    return tensors, _hidden(options, _band(tensors[0].shape[1], tensors[1].shape[1], left, right, 0))


def _band(seqlen_q: int, seqlen_k: int, left: int, right: int, offset: int, exact: bool = False) -> Tensor:
    place, key = torch.arange(seqlen_q)[:, None] + offset, torch.arange(seqlen_k)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        visible &= key >= place - left
    if right >= 0 or exact:
        visible &= key <= place + right
    return visible


def _hidden(options: Options, visible: Tensor) -> Options:
    rest = _without(options, "causal", "window_size")
    mask = rest.get("mask")
    if mask is not None and mask.dtype == torch.bool:
        return {**rest, "mask": mask & visible}
    if mask is not None:
        return {**rest, "mask": mask.masked_fill(~visible, -torch.inf)}
    return {**rest, "mask": visible[None, None]}


def _joined_mask(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask.double()


def _without(options: Options, *names: str) -> Options:
    return {name: value for name, value in options.items() if name not in names}


def _leaking(problem: Problem, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Each sequence also sees the keys of `before` and `after` of its neighbours, with the band where it was."""
    assert problem.sequences is not None
    query, key, value = (tensor.detach().double() for tensor in problem.laid_out())
    parts = list(_sequences(problem, (query, key, value)))
    outputs, lses = [], []
    for index, ((query, _, _), options) in enumerate(parts):
        members = range(max(0, index - before), min(len(parts), index + after + 1))
        key = torch.cat([parts[member][0][1] for member in members], 1)
        value = torch.cat([parts[member][0][2] for member in members], 1)
        output, lse = reference_attention(query, key, value, **options)
        outputs.append(output[0])
        lses.append(lse[0])
    return torch.cat(outputs), torch.cat(lses, 1)


def _offsets_off(problem: Problem, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Each sequence's keys begin `before` rows too early and end `after` rows too late."""
    assert problem.sequences is not None
    query, key, value = (tensor.detach().double() for tensor in problem.laid_out())
    outputs, lses, end = [], [], 0
    for length, ((rows, _, _), options) in zip(
        problem.sequences.lengths_k, _sequences(problem, (query, key, value)), strict=True
    ):
        keys = slice(max(0, end - before), max(0, end + length + after))
        end += length
        output, lse = reference_attention(rows, key[None, keys], value[None, keys], **options)
        outputs.append(output[0])
        lses.append(lse[0])
    return torch.cat(outputs), torch.cat(lses, 1)


def _keys_by_query_offsets(problem: Problem) -> tuple[Tensor, Tensor]:
    assert problem.sequences is not None
    query, key, value = (tensor.detach().double() for tensor in problem.laid_out())
    outputs, lses, begin = [], [], 0
    for length, (_, options) in zip(problem.sequences.lengths, _sequences(problem, (query, key, value)), strict=True):
        rows = slice(begin, begin + length)
        output, lse = reference_attention(query[None, rows], key[None, rows], value[None, rows], **options)
        outputs.append(output[0])
        lses.append(lse[0])
        begin += length
    return torch.cat(outputs), torch.cat(lses, 1)
