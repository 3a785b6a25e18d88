"""The precision rule: the error against float64 is at most twice that of the same computation by plain PyTorch in the
same dtype, plus one unit in the last place of the output.

The error is the largest over the tensor. For gradients it is the root mean square, and there are four units, of the
largest gradient of the call: a backward pass that recomputes its weights rounds once more than the plain one, and that
stays where the terms of a gradient cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ORACLE_UNITS = 16
GRADIENT_UNITS = 4


@dataclass(frozen=True, slots=True)
class Comparison:
    """A result beside the oracle's.

    Attributes:
        problem: what is wrong besides the size of the error, in words; empty where nothing is.
        error, allowed: None where `problem` left nothing to measure.
        declared: how many times the rule's error is allowed, because the backend declares it.
    """

    problem: str = ""
    error: float | None = None
    allowed: float | None = None
    declared: float = 1.0

    @property
    def ok(self) -> bool:
        """It is right."""
        return not self.problem and (self.error is None or (self.allowed is not None and self.error <= self.allowed))

    def __str__(self) -> str:
        if self.problem or self.error is None:
            return self.problem or "right"
        declared = f", {self.declared:g} times the rule's, as declared" if self.declared != 1 else ""
        return f"error {self.error:.3g}, allowed {self.allowed:.3g}{declared}"


def compare(
    result: Tensor,
    oracle: Tensor,
    plain: Tensor,
    *,
    largest_gradient: float | None = None,
    dtype: torch.dtype | None = None,
    declared: float = 1.0,
) -> Comparison:
    """`result` held to the precision rule, with -inf in the same places and nothing else that is not finite.

    Args:
        oracle, plain: the same in float64, and by plain PyTorch in the dtype of the call.
        largest_gradient: of all gradients of the call, where this is one of them.
        dtype: of the call, where the result's is another: the gradient of an option has the digits of the call.
        declared: how many times the error that the rule allows.
    """
    if result.shape != oracle.shape:
        return Comparison(f"shape {tuple(result.shape)}, right is {tuple(oracle.shape)}")
    if not result.numel():
        return Comparison(error=0.0, allowed=0.0)
    hidden = torch.isneginf(oracle)
    places = torch.isneginf(result) != hidden
    if places.any():
        return Comparison(f"-inf in other places than the oracle: {_first(places, result, oracle)}")
    exact = oracle.detach().double().masked_fill(hidden, 0.0)
    have = result.detach().double().masked_fill(hidden, 0.0)
    infinite = ~torch.isfinite(have)
    if infinite.any():
        return Comparison(f"{int(infinite.sum())} values are not finite: {_first(infinite, result, oracle)}")
    gradient = largest_gradient is not None
    simple = plain.detach().double().masked_fill(hidden, 0.0)
    if not torch.isfinite(simple).all():
        # An infinite error would allow everything.
        place = _first(~torch.isfinite(simple), simple, oracle)
        return Comparison(f"plain PyTorch, whose error is the measure, is not finite in this call: {place}")
    # The oracle has no more digits than a float64 result, so its own rounding has to be allowed there.
    units = ORACLE_UNITS if oracle.dtype == result.dtype else GRADIENT_UNITS if gradient else 1
    largest = exact.abs().max().item() if largest_gradient is None else largest_gradient
    unit = unit_in_last_place(largest, dtype or result.dtype)
    allowed = 2 * _size(simple - exact, gradient) + units * unit
    return Comparison(error=_size(have - exact, gradient), allowed=declared * allowed, declared=declared)


def unit_in_last_place(largest: float, dtype: torch.dtype) -> float:
    """The spacing of `dtype` at `largest`."""
    info = torch.finfo(dtype)
    if largest < info.tiny:
        return info.tiny * info.eps
    return info.eps * 2.0 ** math.floor(math.log2(largest))


def _first(places: Tensor, result: Tensor, oracle: Tensor) -> str:
    at = tuple(places.nonzero()[0].tolist())
    return f"{result[at].item():.4g} at {list(at)}, right is {oracle[at].item():.4g}"


def _size(errors: Tensor, root_mean_square: bool) -> float:
    return (errors.square().mean().sqrt() if root_mean_square else errors.abs().max()).item()
