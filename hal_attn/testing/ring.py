"""Parts of the keys, as the hops of a ring see them: their results merge to the whole, and so do their gradients."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal_attn.backend import AttentionBackend
from hal_attn.packing import PackedSequences
from hal_attn.states import merge_attention_states
from hal_attn.testing.outcome import Outcome, Planned, failed, not_run, passed
from hal_attn.testing.problem import Base, Problem, varlen
from hal_attn.testing.values import Subject, gradient_comparison, judge_pair

# Rows of keys at which they are cut: unequal, a single one, and not at all.
CUTS = ((0, 40), (0, 13, 40), (0, 1, 2, 39, 40))


def plans(subject: Subject, base: Base) -> Iterator[Planned]:
    """All checks of this module, for a backend that has the ring hook."""
    grouped = 2 if base.heads % 2 == 0 else None
    calls: dict[str, tuple[Callable[[Subject, Problem], Outcome], Problem]] = {
        "plain": (_merges, varlen(base, (24,), (40,))),
        "2 key heads": (_merges, varlen(base, (24,), (40,), kv_heads=grouped)),
        "scale": (_merges, varlen(base, (24,), (40,), scale=0.3)),
        "softcap": (_merges, varlen(base, (24,), (40,), softcap=0.8)),
        "causal": (_causal, varlen(base, (40,), causal=True)),
        "several sequences": (_several, varlen(base, (20, 12))),
    }
    parameters = _parameters(subject)
    for name, (run, problem) in calls.items():
        given = (*problem.options, *(("sequences",) if run is _several else ()))
        if set(given) <= set(parameters) and not subject.road.refusals(problem, return_lse=True):
            yield Planned(f"ring, {name}", "ring merge", "merging", partial(run, subject, problem))
    if type(subject.road.backend).backward_varlen is not AttentionBackend.backward_varlen:
        yield Planned("ring, gradients of a part", "ring merge", "gradients", partial(_backward, subject, base))


def _merges(subject: Subject, problem: Problem) -> Outcome:
    right = subject.right_answer(problem)
    query, key, value = problem.on(subject.road.device).tensors
    outcome = Outcome("passed")
    for cut in CUTS:
        rows = [slice(first, last) for first, last in itertools.pairwise(cut)]
        parts = [_chunk(subject, query, key[part], value[part], **problem.options) for part in rows]
        outcome = _judge(subject, problem, parts, right, f"{len(parts)} parts")
        if outcome.status == "failed":
            return outcome
    return outcome


def _causal(subject: Subject, problem: Problem) -> Outcome:
    """The second half of the queries: all of the first half of the keys, and a causal square of its own."""
    right = subject.right_answer(problem)
    query, key, value = problem.on(subject.road.device).tensors
    first, second = slice(0, 20), slice(20, 40)
    early = _chunk(subject, query[first], key[first], value[first], causal=True)
    late = [
        _chunk(subject, query[second], key[second], value[second], causal=True),
        _chunk(subject, query[second], key[first], value[first]),
    ]
    merged = merge_attention_states(*zip(*late, strict=True))
    whole = torch.cat([early[0], merged[0]]), torch.cat([early[1], merged[1]], 1)
    return judge_pair(subject, problem, whole, right, "merging")


def _several(subject: Subject, problem: Problem) -> Outcome:
    """Chunks of two sequences at once, cut at other places in each."""
    right = subject.right_answer(problem)
    query, key, value = problem.on(subject.road.device).tensors
    parts = []
    for first, second in ((slice(0, 8), slice(20, 25)), (slice(8, 20), slice(25, 32))):
        keys, values = (torch.cat([tensor[first], tensor[second]]) for tensor in (key, value))
        lengths_k = [rows.stop - rows.start for rows in (first, second)]
        sequences = PackedSequences.from_lengths([20, 12], lengths_k)
        parts.append(_chunk(subject, query, keys, values, sequences=sequences))
    return _judge(subject, problem, parts, right, "2 parts")


def _backward(subject: Subject, base: Base) -> Outcome:
    """Gradients of each half of the keys, with output and LSE of the whole, add up to those of the whole."""
    problem = varlen(base, (24,), (40,))
    right = subject.right_answer(problem)
    device = subject.road.device
    query, key, value = problem.on(device).tensors
    weight, scale = right.weight.to(device), query.shape[-1] ** -0.5
    output, lse = right.output.to(device, query.dtype), right.lse.to(device, torch.float32)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in (slice(0, 13), slice(13, 40)):
        sequences = PackedSequences.from_lengths([24], [part.stop - part.start])
        given: dict[str, Any] = {"sequences": sequences, "scale": scale, "causal": False, "window_size": None}
        result = subject.road.backend.backward_varlen(
            weight, query, key[part], value[part], output, lse, deterministic=False, **given
        )
        if result is None:
            return not_run("backward_varlen gave None: plain PyTorch computes the gradients of a part")
        found.append(result)
    sums = (
        found[0][0].double() + found[1][0].double(),
        torch.cat([found[0][1], found[1][1]]),
        torch.cat([found[0][2], found[1][2]]),
    )
    for name, have, exact, plain in zip("qkv", sums, right.gradients, right.plain_gradients, strict=True):
        have = have.to(query.dtype)
        comparison = gradient_comparison(subject, have, exact, plain, right.largest_gradient)
        if not comparison.ok:
            return failed(f"gradient of {name} from parts: {comparison}", "gradients", comparison)
    return passed(comparison)


def _parameters(subject: Subject) -> tuple[str, ...]:
    signature = inspect.signature(subject.road.backend.forward_ring_kv_chunk)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    every = ("sequences", "scale", "causal", "window_size", "softcap")
    return every if inspect.Parameter.VAR_KEYWORD in kinds else tuple(signature.parameters)


def _chunk(subject: Subject, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return subject.road.backend.forward_ring_kv_chunk(query, key, value, **options)


def _judge(subject: Subject, problem: Problem, parts: list[tuple[Tensor, Tensor]], right: Any, what: str) -> Outcome:
    for output, lse in parts:
        shape = (problem.query.shape[1], problem.query.shape[0])
        if lse.dtype != torch.float32 or tuple(lse.shape) != shape:
            text = f"the LSE of a part is {lse.dtype} {tuple(lse.shape)}, right is float32 {shape}"
            return failed(text, "LSE")
        if output.dtype != problem.query.dtype:
            return failed(f"the output of a part is {output.dtype}, right is {problem.query.dtype}", "contract")
    outcome = judge_pair(subject, problem, merge_attention_states(*zip(*parts, strict=True)), right, "merging")
    if outcome.status == "failed":
        return Outcome("failed", f"merged from {what}: {outcome.message}", outcome.error, outcome.allowed, outcome.rule)
    return outcome
