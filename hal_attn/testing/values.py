"""Output, LSE and gradients of one call, held to the oracle; or its refusal, held to its name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hal_attn.errors import UnsupportedAttentionError
from hal_attn.refusal import Refusal
from hal_attn.request import tensor_options
from hal_attn.testing import diagnosis
from hal_attn.testing.cases import Case
from hal_attn.testing.oracle import Expected, expected
from hal_attn.testing.outcome import Outcome, failed, passed
from hal_attn.testing.precision import Comparison, compare
from hal_attn.testing.problem import Base, Problem
from hal_attn.testing.road import Road


@dataclass(frozen=True)
class Subject:
    """A backend under check: the road to it, and how many times the rule's error it declares, by dtype."""

    road: Road
    tolerances: tuple[tuple[torch.dtype, float], ...] = ()

    def declared(self, dtype: torch.dtype) -> float:
        """How many times the error of the precision rule is allowed in `dtype`; 1.0 where it declares nothing."""
        return dict(self.tolerances).get(dtype, 1.0)

    def right_answer(self, problem: Problem) -> Expected:
        """The right answer to a call as it is laid out, and plain PyTorch's on the device of the call."""
        return right_answer(problem, self.road.device)


@lru_cache(maxsize=12)
def answer(case: Case, base: Base, device: torch.device) -> tuple[Problem, Expected]:
    """The call of a case and the right answer to it, kept a while: LSE and gradients are checked after the output."""
    problem = case.make(base)
    return problem, right_answer(problem, device)


def right_answer(problem: Problem, device: torch.device) -> Expected:
    """The right answer to a call as it is laid out; plain PyTorch computes on `device`, where the call runs."""
    options = {name: value for name, value in problem.given.items() if name in _OF_THE_ORACLE}
    return expected(*(tensor.contiguous() for tensor in problem.laid_out()), device=device, **options)


_OF_THE_ORACLE = (
    *("scale", "causal", "window_size", "mask", "key_padding_mask", "softcap", "sinks", "alibi_slopes"),
    "sequences",
)


def check_output(subject: Subject, case: Case, base: Base) -> Outcome:
    """The output of a call, without the LSE."""
    problem, right = answer(case, base, subject.road.device)
    return output_outcome(subject, problem, right, case.rule)


def output_outcome(subject: Subject, problem: Problem, right: Expected, rule: str) -> Outcome:
    """`check_output` for a call given by hand."""
    given = problem.on(subject.road.device)
    with torch.no_grad():
        result = subject.road.run(given)
    return _unlike(problem, given) or judge_output(subject, problem, result, right, rule)


def judge_output(subject: Subject, problem: Problem, result: Any, right: Expected, rule: str) -> Outcome:
    """An output beside the oracle's."""
    wrong = _form("output", result, problem.query.dtype, subject.road.device)
    if wrong is not None:
        return wrong
    found = result.detach().cpu()
    comparison = compare(found, right.output, right.plain_output, declared=subject.declared(found.dtype))
    if not comparison.ok:
        return diagnosis.of_output(problem, found, right, comparison, rule)
    blind = diagnosis.blind_output(found, right.lse)
    return failed(f"output: {blind}", "blind rows") if blind else passed(comparison)


def check_lse(subject: Subject, case: Case, base: Base) -> Outcome:
    """Output and LSE of the call that returns both."""
    problem, right = answer(case, base, subject.road.device)
    with torch.no_grad():
        result = subject.road.run(problem.on(subject.road.device), return_lse=True)
    return judge_pair(subject, problem, result, right, case.rule)


def judge_pair(subject: Subject, problem: Problem, result: Any, right: Expected, rule: str) -> Outcome:
    """An (output, LSE) beside the oracle's."""
    if not isinstance(result, tuple) or len(result) != 2:
        return failed(f"return_lse=True gave a {type(result).__name__}, right is (output, LSE)", "contract")
    outcome = judge_output(subject, problem, result[0], right, rule)
    if outcome.status == "failed":
        return outcome
    wrong = _form("LSE", result[1], torch.float32, subject.road.device)
    if wrong is not None:
        return wrong
    found = result[1].detach().cpu()
    comparison = compare(found, right.lse, right.plain_lse, declared=subject.declared(problem.query.dtype))
    return passed(comparison) if comparison.ok else diagnosis.of_lse(problem, found, right, comparison, rule)


def check_gradients(subject: Subject, case: Case, base: Base) -> Outcome:
    """The gradients of query, key and value."""
    problem, right = answer(case, base, subject.road.device)
    given = problem.on(subject.road.device, requires_grad=True)
    tensors = given.laid_out()
    output = subject.road.call(*tensors, **given.given)
    return judge_gradients(subject, output, tensors, right)


def judge_gradients(subject: Subject, output: Any, tensors: tuple[Tensor, ...], right: Expected) -> Outcome:
    """Gradients for the loss `sum(output * weight)` beside the oracle's."""
    if not isinstance(output, Tensor):
        return failed(f"the output is a {type(output).__name__}", "contract")
    if not output.requires_grad:
        return failed("the output is detached from the inputs that require gradients", "gradients")
    loss = (output * right.weight.to(output.device)).sum()
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    worst = Comparison(error=0.0, allowed=0.0)
    names = ("query", "key", "value")
    for name, have, exact, plain in zip(names, found, right.gradients, right.plain_gradients, strict=True):
        if have is None:
            return failed(f"gradient of {name}: none; it does not depend on {name}", "gradients")
        comparison = gradient_comparison(subject, have, exact, plain, right.largest_gradient)
        if not comparison.ok:
            return diagnosis.of_gradient(name, have.cpu(), exact, comparison)
        worst = max(worst, comparison, key=_share)
    return passed(worst)


def gradient_comparison(
    subject: Subject,
    have: Tensor,
    exact: Tensor,
    plain: Tensor,
    largest_gradient: float,
    dtype: torch.dtype | None = None,
) -> Comparison:
    """One gradient beside the oracle's; `dtype` is the call's where the gradient has another."""
    declared = subject.declared(dtype or have.dtype)
    found = have.detach().cpu()
    return compare(found, exact, plain, largest_gradient=largest_gradient, dtype=dtype, declared=declared)


def refusal_outcome(
    subject: Subject, problem: Problem, refusals: tuple[Refusal, ...], names: set[str], **more: Any
) -> Outcome:
    """A call that is refused: by the name of something that it sets, and with an error that says so.

    Args:
        names: what a refusal may be called.
        more: what the call has besides the problem's options; `gradients=True` for inputs that require them.
    """
    if not names & {refusal.rule for refusal in refusals}:
        seen = "; ".join(str(refusal) for refusal in refusals)
        return failed(f"it is refused, but by no name of {', '.join(sorted(names))}: {seen}", "refused by name")
    gradients = more.pop("gradients", False)
    try:
        subject.road.run(problem.on(subject.road.device, requires_grad=gradients), **more)
    except UnsupportedAttentionError as error:
        missing = [str(refusal) for refusal in refusals if str(refusal) not in str(error)]
        if missing:
            return failed(f"the error leaves out {missing[0]}", "refused by name")
        return Outcome("refused", str(next(refusal for refusal in refusals if refusal.rule in names)))
    return failed("the call ran, though its refusals are " + "; ".join(map(str, refusals)), "refused by name")


def _form(what: str, result: Any, dtype: torch.dtype, device: torch.device) -> Outcome | None:
    """What is wrong with a result besides its values and shape."""
    if not isinstance(result, Tensor):
        return failed(f"{what}: a {type(result).__name__}, right is a tensor", "contract")
    if result.dtype != dtype:
        return failed(f"{what}: {result.dtype}, right is {dtype}", "LSE" if what == "LSE" else "contract")
    if result.device.type != device.type:
        return failed(f"{what}: on {result.device}, right is {device}", "contract")
    return None


def _unlike(problem: Problem, given: Problem) -> Outcome | None:
    """A failure where the call changed an input."""
    for name, before, after in zip(("query", "key", "value"), problem.tensors, given.tensors, strict=True):
        if not torch.equal(before, after.cpu()):
            return failed(f"the call changed {name} in place", "arguments")
    for name, option in tensor_options(given.options).items():
        if not torch.equal(problem.options[name], option.cpu()):
            return failed(f"the call changed {name} in place", "arguments")
    return None


def _share(comparison: Comparison) -> float:
    """The error as a share of what is allowed."""
    if comparison.error is None or not comparison.allowed:
        return 0.0
    return comparison.error / comparison.allowed
