"""Gradients beyond those of query, key and value: through the LSE, and of the options that are tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal_attn.reference import reference_attention, reference_varlen_attention
from hal_attn.refusal import Refusal
from hal_attn.testing import diagnosis
from hal_attn.testing.outcome import Outcome, Planned, failed, passed
from hal_attn.testing.plain import full_precision, plain_attention, plain_varlen_attention
from hal_attn.testing.problem import Base, Problem, batched, float_mask, sinks, slopes, varlen
from hal_attn.testing.tensors import randn
from hal_attn.testing.values import Subject, gradient_comparison, refusal_outcome


def plans(subject: Subject, base: Base, batches: bool, packs: bool) -> Iterator[Planned]:
    """All checks of this module."""
    through_lse: dict[str, Problem] = {}
    options: dict[str, Problem] = {}
    if batches:
        through_lse |= {"plain": batched(base), "causal": batched(base, 65, 37, causal=True)}
        options |= {
            "mask": batched(base, mask=float_mask()),
            "sinks": batched(base, sinks=sinks()),
            "alibi_slopes": batched(base, alibi_slopes=slopes()),
        }
    if packs:
        through_lse["packed"] = varlen(base)
    for name, problem in through_lse.items():
        refusals = subject.road.refusals(problem, gradients=True, return_lse=True)
        run = partial(_of_lse, subject, problem, refusals)
        yield Planned(f"gradient through the LSE, {name}", "gradient of LSE", "gradients", run, refusals=refusals)
    for name, problem in options.items():
        wanting = _wanting(problem, name)
        refusals = subject.road.refusals(wanting)
        run = partial(_of_option, subject, wanting, name, refusals)
        yield Planned(f"gradient of {name}", "gradient of options", "gradients", run, refusals=refusals)


def _wanting(problem: Problem, name: str) -> Problem:
    """The call with a gradient wanted of the option `name`."""
    return replace(problem, options={**problem.options, name: problem.options[name].detach().requires_grad_()})


def _of_lse(subject: Subject, problem: Problem, refusals: tuple[Refusal, ...]) -> Outcome:
    if refusals:
        names = problem.may_be_refused_as() | {"return_lse", "lse", "gradients"}
        return refusal_outcome(subject, problem, refusals, names, gradients=True, return_lse=True)
    given = problem.on(subject.road.device, requires_grad=True)
    output, lse = subject.road.run(given, return_lse=True)
    if not lse.requires_grad:
        return failed("the LSE is detached from the inputs, and lse_gradient is claimed", "gradients")
    found = torch.autograd.grad(_loss(output, lse), given.tensors)
    exact, plain = _exact_and_plain(subject, problem)
    return _judge(subject, ("query", "key", "value"), found, exact, plain, problem.query.dtype)


def _of_option(subject: Subject, problem: Problem, name: str, refusals: tuple[Refusal, ...]) -> Outcome:
    if refusals:
        return refusal_outcome(subject, problem, refusals, problem.may_be_refused_as() | {"gradients"})
    given = problem.on(subject.road.device)
    output = subject.road.run(given)
    assert isinstance(output, Tensor)
    if not output.requires_grad:
        return failed(f"the output is detached from {name}, whose gradient is claimed", "gradients")
    found = torch.autograd.grad(_loss(output, None), [problem.options[name]])
    exact, plain = _exact_and_plain(subject, problem, name)
    return _judge(subject, (name,), found, exact, plain, problem.query.dtype)


def _exact_and_plain(
    subject: Subject, problem: Problem, name: str = ""
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The gradients by the oracle, and by plain PyTorch on the device of the call; both on the CPU."""
    packed, device = problem.sequences is not None, subject.road.device
    exact = _gradients(_doubled(problem), reference_varlen_attention if packed else reference_attention, name)
    with full_precision(device):
        plain = _gradients(problem.on(device), plain_varlen_attention if packed else plain_attention, name)
    return exact, tuple(gradient.cpu() for gradient in plain)


def _doubled(problem: Problem) -> Problem:
    """The call in float64."""
    query, key, value = (tensor.double() for tensor in problem.tensors)
    doubled = {name: option.double() if _is_float(option) else option for name, option in problem.options.items()}
    return replace(problem, query=query, key=key, value=value, options=doubled)


def _is_float(option: Any) -> bool:
    return isinstance(option, Tensor) and option.is_floating_point()


def _gradients(problem: Problem, function: Any, name: str) -> tuple[Tensor, ...]:
    """Of query, key and value through output and LSE, or of the option `name` through the output."""
    options, extra = dict(problem.options), () if problem.sequences is None else (problem.sequences,)
    tensors = tuple(tensor.detach().requires_grad_(not name) for tensor in problem.tensors)
    leaves = tensors
    if name:
        options[name] = options[name].detach().requires_grad_()
        leaves = (options[name],)
    output, lse = function(*tensors, *extra, **options)
    return torch.autograd.grad(_loss(output, None if name else lse), leaves)


def _loss(output: Tensor, lse: Tensor | None) -> Tensor:
    loss = (output * randn(*output.shape, seed=98).to(output.device, output.dtype)).sum()
    if lse is None:
        return loss
    weight = randn(*lse.shape, seed=97).to(lse.device, lse.dtype)
    return loss + (torch.where(torch.isneginf(lse), 0.0, lse) * weight).sum()


def _judge(
    subject: Subject,
    names: tuple[str, ...],
    found: tuple[Tensor, ...],
    exact: tuple[Tensor, ...],
    plain: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> Outcome:
    largest = max(gradient.abs().max().item() for gradient in exact)
    for name, have, right, simple in zip(names, found, exact, plain, strict=True):
        comparison = gradient_comparison(subject, have, right, simple, largest, dtype)
        if not comparison.ok:
            return diagnosis.of_gradient(name, have.cpu(), right, comparison)
    return passed(comparison)
