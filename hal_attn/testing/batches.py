"""What is prepared for a packed batch, the hooks called by hand as a serving engine does, and waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.packing import PackedSequences
from hal_attn.refusal import Refusal
from hal_attn.testing.outcome import PASSED, Outcome, Planned, failed, not_run
from hal_attn.testing.problem import Base, Problem, batched, varlen
from hal_attn.testing.values import Subject, judge_output

QUERIES = (37, 1, 20)
OTHERS = (20, 1, 37)


def plans(subject: Subject, base: Base, batches: bool, packs: bool) -> Iterator[Planned]:
    """All checks of this module."""
    made: dict[str, tuple[str, str, Callable[[Subject, Base], Outcome]]] = {}
    hooks = subject.road.backend.implements
    if packs:
        made |= {f"packed, {name}": ("metadata", "metadata", run) for name, run in _SHARED.items()}
    if packs and hooks("forward_varlen"):
        made["forward_varlen by hand"] = ("contract", "contract", _by_hand)
    if batches and hooks("forward"):
        made["forward by hand"] = ("contract", "contract", _forward_by_hand)
    for name, (feature, rule, run) in made.items():
        yield Planned(name, feature, rule, partial(run, subject, base))
    yield from _no_waiting(subject, base, batches, packs)


def _no_waiting(subject: Subject, base: Base, batches: bool, packs: bool) -> Iterator[Planned]:
    kind = subject.road.device.type
    if kind != "cuda":
        where = "CPU tensors" if kind == "cpu" else f"{kind} devices"
        text = f"PyTorch reports waits on CUDA and ROCm devices only, and not on {where}"
        refusal = Refusal("device", kind, "cuda")
        yield Planned("no waiting", "no waiting", "no waiting", lambda: not_run(text), refusals=(refusal,))
        return
    if batches:
        yield Planned("no waiting", "no waiting", "no waiting", partial(_waits, subject, batched(base)))
    if packs:
        causal = varlen(base, QUERIES, causal=True)
        problem = varlen(base, QUERIES) if subject.road.refusals(causal) else causal
        yield Planned("packed, no waiting", "no waiting", "no waiting", partial(_waits, subject, problem))


def _other_values(subject: Subject, base: Base) -> Outcome:
    sequences = PackedSequences.from_lengths(QUERIES)
    problems = [replace(varlen(base, QUERIES, seed=seed), sequences=sequences) for seed in (0, 1, 0)]
    return _all_right(subject, problems, "a batch whose preparation another layer shares")


def _other_lengths(subject: Subject, base: Base) -> Outcome:
    problems = [varlen(base, lengths) for lengths in (QUERIES, OTHERS, QUERIES)]
    return _all_right(subject, problems, "sequences with the total and the longest of those before")


def _other_options(subject: Subject, base: Base) -> Outcome:
    sequences = PackedSequences.from_lengths(QUERIES)
    every: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window_size": (3, 2)}, {"kv_heads": 2}, {"scale": 0.3})
    problems = [replace(varlen(base, QUERIES, **options), sequences=sequences) for options in (*every, {})]
    taken = [problem for problem in problems if not subject.road.refusals(problem)]
    if len(taken) < 3:
        return not_run("it takes no option on a packed call")
    return _all_right(subject, taken, "a batch whose preparation a call with other options shares")


def _inference_mode(subject: Subject, base: Base) -> Outcome:
    problem = varlen(base, QUERIES)
    with torch.inference_mode():
        subject.road.run(problem.on(subject.road.device))
    wanted = not subject.road.refusals(problem, gradients=True)
    given = problem.on(subject.road.device, requires_grad=wanted)
    output = subject.road.run(given)
    if wanted:
        torch.autograd.grad(output.sum(), given.tensors)  # type: ignore[union-attr]
    return judge_output(subject, problem, output, subject.right_answer(problem), "metadata")


def _device_offsets(subject: Subject, base: Base) -> Outcome:
    problem = varlen(base, QUERIES, causal=True)
    if subject.road.refusals(problem):
        problem = varlen(base, QUERIES)
    right = subject.right_answer(problem)
    given = problem.on(subject.road.device)
    assert problem.sequences is not None
    offsets = problem.sequences.offsets(subject.road.device)[0]
    known = PackedSequences.from_device_offsets(offsets, offsets, max(QUERIES), max(QUERIES))
    given = replace(given, sequences=known)
    refusals = subject.road.selection(given.tensors, given.given).considered[0].refusals
    if refusals:
        return not_run(f"it refuses offsets that only the device knows ({refusals[0]})")
    with torch.no_grad():
        return judge_output(subject, problem, subject.road.run(given), right, "packed")


def _all_right(subject: Subject, problems: list[Problem], what: str) -> Outcome:
    for problem in problems:
        given = problem.on(subject.road.device)
        with torch.no_grad():
            outcome = judge_output(subject, problem, subject.road.run(given), subject.right_answer(problem), "metadata")
        if outcome.status == "failed":
            return replace(outcome, message=f"{what}: {outcome.message}")
    return outcome


def _by_hand(subject: Subject, base: Base) -> Outcome:
    """The packed hook with the arguments that every caller has, host offsets or not, and nothing else."""
    problem = varlen(base, QUERIES)
    right, backend, device = subject.right_answer(problem), subject.road.backend, subject.road.device
    assert problem.sequences is not None
    offsets = problem.sequences.offsets(device)[0]
    given: dict[str, Any] = {"cu_seqlens": offsets, "max_seqlen": max(QUERIES)}
    given["cu_seqlens_host"] = problem.sequences.cu_seqlens_host
    if type(backend).metadata_builder is not AttentionBackend.metadata_builder:
        request = subject.road.request(problem)
        given["metadata"] = backend.metadata_builder().build(problem.sequences, request)
    with torch.no_grad():
        output = backend.forward_varlen(*problem.on(device).tensors, **given)
    return judge_output(subject, problem, output, right, "contract")


def _forward_by_hand(subject: Subject, base: Base) -> Outcome:
    problem = batched(base)
    with torch.no_grad():
        output = subject.road.backend.forward(*problem.on(subject.road.device).tensors)
    return judge_output(subject, problem, output, subject.right_answer(problem), "contract")


def _waits(subject: Subject, problem: Problem) -> Outcome:
    device = subject.road.device
    given = problem.on(device)
    with torch.no_grad():
        subject.road.run(given)
        torch.cuda.synchronize(device)
        fresh = given
        if given.sequences is not None:
            fresh = replace(given, sequences=PackedSequences.from_lengths(QUERIES))
        torch.cuda.set_sync_debug_mode("error")
        try:
            subject.road.run(fresh)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return failed(f"a call waited for the device: {error}", "no waiting")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return PASSED


_SHARED = MappingProxyType(
    {
        "layers with other values": _other_values,
        "other lengths with the same total": _other_lengths,
        "other options on the same batch": _other_options,
        "made in inference mode": _inference_mode,
        "offsets that only the device knows": _device_offsets,
    }
)
