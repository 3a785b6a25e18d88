"""All checks of one backend. What it takes is found by asking it, so that nothing runs before its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from hal_attn.refusal import Refusal
from hal_attn.testing import batches, claims, leaks, more_gradients, repeats, ring
from hal_attn.testing.cases import Case, cases
from hal_attn.testing.features import FEATURES
from hal_attn.testing.outcome import Outcome, Planned
from hal_attn.testing.problem import Base, Problem, batched, varlen
from hal_attn.testing.report import Effort
from hal_attn.testing.values import Subject, check_gradients, check_lse, check_output, refusal_outcome

# Float32 first: where a kernel has it, it shows the most.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEAD_DIMS = (64, 128, 32, 16, 8, 96, 192, 256, 4, 1)


def plan(subject: Subject, effort: Effort) -> tuple[Planned, ...]:
    """The checks of a backend, in order."""
    bases = {dtype: base for dtype in DTYPES if (base := _base(subject, dtype)) is not None}
    made = list(claims.plans(subject))
    if not bases:
        return (*made, Planned("something is claimed", "contract", "claims", lambda: claims.nothing(subject)))
    first = next(iter(bases.values()))
    made += [_refused_dtype(subject, dtype, first) for dtype in DTYPES if dtype not in bases]
    for base in bases.values():
        made += _calls(subject, base, effort, primary=base is first)
        if effort == "full" or base is first:
            made += _others(subject, base)
    return (*made, *claims.kept(subject, made))


def claimed(planned: tuple[Planned, ...]) -> tuple[str, ...]:
    """The features of calls that the backend takes, as far as it was asked."""
    taken = {each.feature for each in planned if not each.refusals and each.rule != "claims"}
    return tuple(feature for feature in FEATURES if feature in taken)


def _base(subject: Subject, dtype: torch.dtype) -> Base | None:
    """What plain calls of this dtype have, or None where none is taken."""
    for dim in HEAD_DIMS:
        base = Base(dtype, dim)
        if any(not subject.road.refusals(make(base)) for make in (batched, varlen)):
            return base
    return None


def _refused_dtype(subject: Subject, dtype: torch.dtype, like: Base) -> Planned:
    problem = batched(Base(dtype, like.head_dim))
    if {refusal.rule for refusal in subject.road.refusals(batched(like))} & {"hook"}:
        problem = varlen(Base(dtype, like.head_dim))
    return _planned(
        subject, f"refused in {_short(dtype)}", f"dtype {_short(dtype)}", "precision", problem, {"dtype", "device"}
    )


def _calls(subject: Subject, base: Base, effort: Effort, *, primary: bool) -> Iterator[Planned]:
    """Every case in one dtype: output, and LSE and gradients where the output is taken."""
    plain = {packed: not subject.road.refusals(make(base)) for packed, make in ((False, batched), (True, varlen))}
    for case in cases():
        if effort == "quick" and (case.full or not (primary or case.every_dtype)):
            continue
        problem = case.make(base)
        if not plain[problem.packed] and case.make not in (batched, varlen):
            continue
        yield from _case(subject, case, base, problem, primary=primary)


def _case(subject: Subject, case: Case, base: Base, problem: Problem, *, primary: bool) -> Iterator[Planned]:
    of_dtype = case.feature == "dtype" or (case.every_dtype and not primary)
    feature = f"dtype {_short(base.dtype)}" if of_dtype else case.feature
    name, has = f"{case.name} [{_short(base.dtype)}]", subject.road.backend.capabilities
    output = _planned(subject, name, feature, case.rule, problem, {"hook"}, partial(check_output, subject, case, base))
    yield output
    if output.refusals:
        return
    # Of what is not claimed at all, one refusal is looked at in each dtype.
    if has.lse or case.every_dtype:
        run = partial(check_lse, subject, case, base)
        names = {"return_lse", "lse"}
        yield _planned(subject, f"{name}: LSE", "LSE", "LSE", problem, names, run, return_lse=True)
    if has.gradients or case.every_dtype:
        run = partial(check_gradients, subject, case, base)
        yield _planned(
            subject, f"{name}: gradients", "gradient", "gradients", problem, {"gradients"}, run, gradients=True
        )


def _planned(
    subject: Subject,
    name: str,
    feature: str,
    rule: str,
    problem: Problem,
    names: set[str],
    run: Callable[[], Outcome] | None = None,
    **more: Any,
) -> Planned:
    """The check of a call, or of its refusal by one of `names` or by what the problem sets."""
    refusals: tuple[Refusal, ...] = subject.road.refusals(problem, **more)
    given = {key: value for key, value in more.items() if key != "gradients"}

    def request() -> str:
        return subject.road.request(problem, **given).describe() + (", gradients" if more.get("gradients") else "")

    if refusals or run is None:
        allowed = names | problem.may_be_refused_as()
        run = partial(refusal_outcome, subject, problem, refusals, allowed, **more)
        rule = "refused by name"
    return Planned(name, feature, rule, run, request, refusals)


def _others(subject: Subject, base: Base) -> Iterator[Planned]:
    """What is no single call."""
    batches_taken, packs_taken = (not subject.road.refusals(make(base)) for make in (batched, varlen))
    suffix = f" [{_short(base.dtype)}]"
    made = [
        *(
            each
            for module in (more_gradients, repeats, leaks, batches)
            for each in module.plans(subject, base, batches_taken, packs_taken)
        ),
    ]
    # The LSE is float32, so what is merged by it has the digits of float32.
    if subject.road.backend.implements("forward_ring_kv_chunk") and base.dtype != torch.float64:
        made += ring.plans(subject, base)
    for each in made:
        yield Planned(each.name + suffix, each.feature, each.rule, each.run, each.request, each.refusals)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
