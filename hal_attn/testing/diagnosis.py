"""What a wrong result looks like: a known mistake, too little precision, or none that is known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hal_attn.guard import attempt
from hal_attn.testing.oracle import Expected
from hal_attn.testing.outcome import Outcome, failed
from hal_attn.testing.precision import Comparison
from hal_attn.testing.problem import Problem
from hal_attn.testing.suspects import lse_suspects, suspects

# A result is a suspect's when it is this much nearer to the suspect's answer than that is to the right one.
NEARER = 0.1
# A known mistake shows only where its answer is this many times what the precision rule allows away from the right one:
# nearer than that, lost digits look the same. Suspects of lost digits themselves are held to once.
SHOWS = 2.0
# Errors below this share of the largest value are lost digits, not another formula.
ROUNDING = 0.03


def of_output(problem: Problem, found: Tensor, right: Expected, comparison: Comparison, rule: str) -> Outcome:
    """The failure of an output `[B, Sq, H, Dv]` or `[Tq, H, Dv]`."""
    if found.shape != right.output.shape:
        return failed(f"output: {comparison}", "contract", comparison)
    known = _closest(problem, found, right.output, comparison, 0)
    if known is None:
        blind = blind_output(found, right.lse)
        known = (blind, "blind rows") if blind else _lost_digits(comparison, right.output)
    return _failure("output", comparison, known, rule)


def of_lse(problem: Problem, found: Tensor, right: Expected, comparison: Comparison, rule: str) -> Outcome:
    """The failure of an LSE `[B, H, Sq]` or `[H, Tq]`."""
    if found.shape != right.lse.shape:
        return failed(f"LSE: {comparison}", "LSE", comparison)
    for text, wrong in lse_suspects(right.lse, problem):
        if _near(found, wrong, right.lse, comparison, torch.isneginf(right.lse)):
            return _failure("LSE", comparison, (text, "LSE"), "LSE")
    blind = torch.isneginf(right.lse)
    if (found[blind] != -torch.inf).any():
        seen = found[blind][found[blind] != -torch.inf][0].item()
        text = f"a query that sees no key has LSE {seen:g}, right is -inf"
        return _failure("LSE", comparison, (text, "blind rows"), "blind rows")
    known = _closest(problem, found, right.lse, comparison, 1)
    return _failure("LSE", comparison, known or _lost_digits(comparison, right.lse), rule)


def of_gradient(which: str, found: Tensor, exact: Tensor, comparison: Comparison) -> Outcome:
    """The failure of one gradient."""
    what = f"gradient of {which}"
    if found.shape != exact.shape or not torch.isfinite(found).all():
        return failed(f"{what}: {comparison}", "gradients", comparison)
    have, right = found.double().flatten(), exact.double().flatten()
    known = None
    if not have.any():
        known = ("it is 0 everywhere: nothing flows back", "gradients")
    elif right.any():
        factor = (torch.dot(have, right) / torch.dot(right, right)).item()
        if abs(factor - 1) > ROUNDING and (have - factor * right).norm() <= NEARER * (have - right).norm():
            known = (f"it is the right one times {factor:.4g}", "gradients")
    return _failure(what, comparison, known or _lost_digits(comparison, exact), "gradients")


def blind_output(found: Tensor, lse: Tensor) -> str:
    """What the first query that sees no key has as output, where it is not 0; empty where all have 0."""
    rows = found[torch.isneginf(lse).transpose(-1, -2)]
    wrong = rows[rows != 0]
    return f"a query that sees no key has output {wrong[0].item():g}, right is 0" if wrong.numel() else ""


def _failure(what: str, comparison: Comparison, known: tuple[str, str] | None, rule: str) -> Outcome:
    if known is None:
        return failed(f"{what}: {comparison}; it looks like no known mistake", rule, comparison)
    return failed(f"{what}: {comparison}; it looks like this: {known[0]}", known[1], comparison)


def _closest(
    problem: Problem, found: Tensor, right: Tensor, comparison: Comparison, part: int
) -> tuple[str, str] | None:
    """(what it looks like, rule) of the first suspect whose output (`part` 0) or LSE (1) `found` equals."""
    for suspect in suspects(problem):
        wrong, failure = attempt(lambda answer=suspect.answer: answer(problem)[part], None)  # type: ignore[misc]
        shows = 1.0 if suspect.rule == "precision" else SHOWS
        if not failure and wrong is not None and _near(found, wrong, right, comparison, shows=shows):
            return suspect.text, suspect.rule
    return None


def _near(
    found: Tensor,
    wrong: Tensor,
    right: Tensor,
    comparison: Comparison,
    aside: Tensor | None = None,
    *,
    shows: float = SHOWS,
) -> bool:
    """`found` is the wrong answer, and that is not the right one but for a few digits."""
    if not found.shape == wrong.shape == right.shape:
        return False
    if aside is not None:
        found, wrong, right = (tensor.masked_fill(aside, 0.0) for tensor in (found, wrong, right))
    apart, left = _apart(right, wrong), _apart(found, wrong)
    # Where the wrong answer has an infinity that neither other has, both distances are infinite and say nothing.
    return apart > shows * (comparison.allowed or 0.0) and math.isfinite(left) and left <= NEARER * apart


def _apart(first: Tensor, second: Tensor) -> float:
    """The largest distance; places where both are the same infinity count as 0, a NaN as infinite."""
    if not first.numel():
        return 0.0
    first, second = first.double(), second.double()
    distance = torch.where(first == second, 0.0, (first - second).abs()).nan_to_num(torch.inf, torch.inf)
    return distance.max().item()


def _lost_digits(comparison: Comparison, right: Tensor) -> tuple[str, str] | None:
    if comparison.error is None or not right.numel():
        return None
    largest = right.masked_fill(torch.isinf(right), 0.0).abs().max().item()
    if comparison.error > ROUNDING * max(largest, 1e-30):
        return None
    return "the right formula with too few digits, as from sums kept in a narrower dtype", "precision"
