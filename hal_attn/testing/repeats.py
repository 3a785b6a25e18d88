"""Dropout, by its statistics, and repeats of a call, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hal_attn.refusal import Refusal
from hal_attn.testing.outcome import Outcome, Planned, failed
from hal_attn.testing.problem import Base, Problem, batched, varlen
from hal_attn.testing.values import Subject, refusal_outcome

# Not a half, where the share that is dropped is the share that is kept.
DROPPED = 0.2
MANY_KEYS = (1025, 700, 2048)
# An order that may change does not change in every pair of calls.
REPEATS = 4


def plans(subject: Subject, base: Base, batches: bool, packs: bool) -> Iterator[Planned]:
    """All checks of this module."""
    for packed in [kind for kind, taken in ((False, batches), (True, packs)) if taken]:
        name = "packed, " if packed else ""
        plain = varlen(base) if packed else batched(base)
        dropped = _one_key(base, packed)
        refusals = subject.road.refusals(dropped)
        yield Planned(
            f"{name}dropout",
            "dropout",
            "dropout",
            partial(_dropout, subject, dropped, refusals),
            refusals=refusals,
        )
        for what, call, options, gradients in (
            ("repeats", plain, {}, False),
            ("repeats with gradients", plain, {}, True),
            ("repeats with dropout, from one seed", plain, {"dropout_p": DROPPED}, False),
            ("repeats, one query over many keys", _one_query(base, packed), {}, False),
        ):
            problem = call.with_options(deterministic=True, **options)
            refusals = subject.road.refusals(problem, gradients=gradients)
            yield Planned(
                f"{name}{what}",
                "deterministic",
                "determinism",
                partial(_repeats, subject, problem, gradients, refusals),
                refusals=refusals,
            )


def _one_query(base: Base, packed: bool) -> Problem:
    """Where kernels cut the keys in parts that run side by side, and may join in any order."""
    return varlen(base, (1, 1, 1), MANY_KEYS) if packed else batched(base, 1, MANY_KEYS[0])


def _one_key(base: Base, packed: bool) -> Problem:
    """Queries that see one key of ones each, with dropout."""
    problem = varlen(base, (240, 60, 100), (1, 1, 1)) if packed else batched(base, 200, 1)
    return replace(problem, value=torch.ones_like(problem.value)).with_options(dropout_p=DROPPED)


def _dropout(subject: Subject, problem: Problem, refusals: tuple[Refusal, ...]) -> Outcome:
    """Each row is 0, for the share that is to be dropped, or one over the share kept."""
    if refusals:
        return refusal_outcome(subject, problem, refusals, problem.may_be_refused_as())
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        outputs.append(_output(subject, problem).float())
        dropped = outputs[-1] == 0
        kept = outputs[-1][~dropped]
        share = dropped.all(-1).double().mean().item()
        # Five standard deviations of the 1600 rows or more.
        if abs(share - DROPPED) > 0.05:
            inverted = "; dropout_p is taken for the share to keep" if abs(share - 1 + DROPPED) <= 0.05 else ""
            return failed(f"{share:.3f} of the weights are dropped, asked for {DROPPED}{inverted}", "dropout")
        if (kept - 1 / (1 - DROPPED)).abs().max() > 0.02:
            return failed(f"what is kept is {kept[0].item():.3f}, right is {1 / (1 - DROPPED):.3f}", "dropout")
    if torch.equal(*outputs):
        return failed("two seeds drop the same weights", "dropout")
    return Outcome("passed")


def _repeats(subject: Subject, problem: Problem, gradients: bool, refusals: tuple[Refusal, ...]) -> Outcome:
    if refusals:
        names = problem.may_be_refused_as() | ({"gradients"} if gradients else set())
        return refusal_outcome(subject, problem, refusals, names, gradients=gradients)
    results: list[dict[str, Tensor]] = []
    lse = not gradients and not subject.road.refusals(problem, return_lse=True)
    for _ in range(REPEATS):
        if problem.options.get("dropout_p"):
            torch.manual_seed(7)
        given = problem.on(subject.road.device, requires_grad=gradients)
        result = subject.road.run(given, return_lse=True) if lse else subject.road.run(given)
        found = dict(zip(("output", "LSE"), result if isinstance(result, tuple) else (result,), strict=False))
        if gradients:
            which = ("gradient of query", "gradient of key", "gradient of value")
            found |= dict(zip(which, torch.autograd.grad(found["output"].sum(), given.tensors), strict=True))
        results.append(found)
    for name, first in results[0].items():
        for second in (result[name] for result in results[1:]):
            if not torch.equal(first, second):
                apart = (first - second).abs().max().item()
                return failed(f"{name}: two calls with deterministic=True differ by {apart:.3g}", "determinism")
    return Outcome("passed")


def _output(subject: Subject, problem: Problem) -> Tensor:
    result = subject.road.run(problem.on(subject.road.device))
    assert isinstance(result, Tensor)
    return result.detach().cpu()
