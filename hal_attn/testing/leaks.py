"""What a query may not see does not reach it: hidden keys, other sequences, other elements of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal_attn.refusal import Refusal
from hal_attn.testing.outcome import Outcome, Planned, failed, not_run, passed
from hal_attn.testing.precision import compare
from hal_attn.testing.problem import Base, Problem, batched, varlen
from hal_attn.testing.values import Subject

LENGTHS = (37, 1, 20)


def plans(subject: Subject, base: Base, batches: bool, packs: bool) -> Iterator[Planned]:
    """All checks of this module; `batches` and `packs` say which plain calls the backend takes."""
    if batches:
        rest = slice(1, None)
        yield _neighbour("other elements of the batch", subject, batched(base), rest, rest, (0,))
        yield from _hidden(subject, base)
    if packs:
        one, kept = slice(37, 38), (slice(0, 37), slice(38, None))
        for causal in (False, True):
            problem = varlen(base, LENGTHS, causal=causal)
            if not subject.road.refusals(problem):
                name = "packed, a neighbour" + (", causal" if causal else "")
                yield _neighbour(name, subject, problem, one, one, kept)
        run = partial(_rows_stay, subject, varlen(base, LENGTHS), one, one, kept, nan=True)
        isolated = subject.road.backend.capabilities.sequences_isolated
        given = ("packed, NaN in a neighbour", "neighbours", "packed")
        yield Planned(*given, run) if isolated else _not_claimed("sequences_isolated", *given)


def _hidden(subject: Subject, base: Base) -> Iterator[Planned]:
    """Keys that a call hides: a call that is refused has its check elsewhere."""
    taken = {name: problem for name, problem in _hidden_keys(base).items() if not subject.road.refusals(problem)}
    for name, problem in taken.items():
        run = partial(_finite, subject, problem, name)
        yield Planned(f"hidden by {name}, changed", "neighbours", "hidden values", run)
    if not subject.road.backend.capabilities.masked_values_ignored:
        yield _not_claimed("masked_values_ignored", "NaN at hidden keys", "hidden values", "hidden values")
        return
    for name, problem in taken.items():
        run = partial(_not_a_number, subject, problem, name)
        yield Planned(f"NaN hidden by {name}", "hidden values", "hidden values", run)


_MAY_REACH = {
    "masked_values_ignored": "NaN at hidden keys may reach the output",
    "sequences_isolated": "NaN and inf in one packed sequence may reach another",
}


def _not_claimed(promise: str, name: str, feature: str, rule: str) -> Planned:
    """The check of a promise that is not made: a field of Capabilities that no call asks for."""
    text = f"{promise} is not claimed: {_MAY_REACH[promise]}"
    return Planned(name, feature, rule, lambda: not_run(text), refusals=(Refusal(promise, "not claimed", "claimed"),))


def _hidden_keys(base: Base) -> dict[str, Problem]:
    """Calls in which keys 0 to 9 are hidden from queries 20 to 36, by what hides them."""
    mask = torch.ones(1, 1, 37, 37, dtype=torch.bool)
    mask[..., 20:, :10] = False
    wide = mask.clone()
    wide[..., :10] = False
    return {
        "bool mask": batched(base, 37, 37, mask=mask),
        "bool mask over whole keys": batched(base, 37, 37, mask=wide),
        "padding": batched(base, 37, 37, key_padding_mask=torch.arange(37).expand(2, 37) >= 10),
        "causal": batched(base, 37, 37, causal=True),
        "window": batched(base, 37, 37, window_size=(9, -1)),
    }


def _hidden_rows(name: str) -> tuple[slice, slice]:
    """(keys that are changed, queries that see none of them)."""
    if name == "causal":
        return slice(27, 37), slice(0, 27)
    return slice(0, 10), slice(0, 37) if name in ("padding", "bool mask over whole keys") else slice(20, 37)


def _neighbour(
    name: str, subject: Subject, problem: Problem, rows_q: slice, rows_k: slice, kept: tuple[Any, ...]
) -> Planned:
    rule = "packed" if problem.packed else "hidden values"
    run = partial(_rows_stay, subject, problem, rows_q, rows_k, kept, nan=False)
    return Planned(f"{name} changed", "neighbours", rule, run)


def _rows_stay(
    subject: Subject, problem: Problem, rows_q: slice, rows_k: slice, kept: tuple[Any, ...], nan: bool
) -> Outcome:
    """The rows `kept` of the output (along the first dimension) are the same when others are replaced."""
    change = _spoilt if nan else _stirred
    query, key, value = problem.tensors
    other = replace(
        problem, query=change(query, rows_q), key=change(key, rows_k), value=change(value, rows_k), layout=None
    )
    before, after = (_output(subject, each) for each in (problem, other))
    for rows in kept:
        if not _same(before[rows], after[rows], subject, problem):
            text = "NaN in another sequence" if nan else "the values of others"
            return failed(f"{text} changed rows that may not see them", "packed" if problem.packed else "hidden values")
    return Outcome("passed")


def _finite(subject: Subject, problem: Problem, name: str) -> Outcome:
    keys, queries = _hidden_rows(name)
    place = (slice(None), keys)
    other = replace(problem, key=_stirred(problem.key, place), value=_stirred(problem.value, place))
    before, after = (_output(subject, each)[:, queries] for each in (problem, other))
    if _same(before, after, subject, problem):
        return Outcome("passed")
    return failed(f"values at keys that {name} hides changed rows that may not see them", "hidden values")


def _not_a_number(subject: Subject, problem: Problem, name: str) -> Outcome:
    keys, queries = _hidden_rows(name)
    right = subject.right_answer(problem)
    place = (slice(None), keys)
    for what in (torch.nan, torch.inf):
        other = replace(problem, key=_spoilt(problem.key, place, what), value=_spoilt(problem.value, place, what))
        found = _output(subject, other)[:, queries]
        declared = subject.declared(found.dtype)
        comparison = compare(found, right.output[:, queries], right.plain_output[:, queries], declared=declared)
        if not comparison.ok:
            return failed(f"{what} at keys that {name} hides: {comparison}", "hidden values", comparison)
    return passed(comparison)


def _output(subject: Subject, problem: Problem) -> Tensor:
    with torch.no_grad():
        result = subject.road.run(problem.on(subject.road.device))
    assert isinstance(result, Tensor)
    return result.cpu()


def _same(before: Tensor, after: Tensor, subject: Subject, problem: Problem) -> bool:
    """Bit for bit; where a repeat of the call is not that either, only both right and finite."""
    if torch.equal(before, after):
        return True
    if not torch.isfinite(after).all():
        return False
    repeats = all(torch.equal(_output(subject, problem), _output(subject, problem)) for _ in range(2))
    return not repeats and torch.allclose(before.double(), after.double(), rtol=1e-2, atol=1e-2)


def _stirred(tensor: Tensor, place: Any) -> Tensor:
    """Other finite values at `place`, larger than any there."""
    changed = tensor.clone()
    changed[place] = 7.0 - 3.0 * changed[place]
    return changed


def _spoilt(tensor: Tensor, place: Any, value: float = torch.nan) -> Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed
