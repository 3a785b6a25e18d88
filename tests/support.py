"""What all tests share: what they take from the conformance kit, the precision rule as an assertion, and the backends
of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from hal_attn import PackedSequences, attention, explain, varlen_attention
from hal_attn.testing.oracle import Expected, expected
from hal_attn.testing.plain import plain_varlen_attention
from hal_attn.testing.precision import ORACLE_UNITS, compare, unit_in_last_place
from hal_attn.testing.tensors import Tensors, dense, packed, randn

__all__ = [
    "CPU_BACKENDS",
    "DTYPES",
    "ORACLE_UNITS",
    "Expected",
    "Tensors",
    "assert_close_to_oracle",
    "assert_right",
    "backends_that_take",
    "call",
    "dense",
    "expected",
    "packed",
    "plain_varlen_attention",
    "randn",
    "unit_in_last_place",
    "visible_pairs",
]

CPU_BACKENDS = ("cpu_flash", "cpu_sdpa", "cpu_math")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def visible_pairs(
    seqlen_q: int, seqlen_k: int, causal: bool = False, window_size: tuple[int | None, int | None] | None = None
) -> Tensor:
    """Bool `[Sq, Sk]`, counted out pair by pair: what causal and the window leave visible."""
    left, right = window_size or (None, None)
    rows = []
    for query in range(seqlen_q):
        place = query + seqlen_k - seqlen_q
        first = 0 if left is None or left < 0 else place - left
        last = seqlen_k if right is None or right < 0 else place + right
        rows.append([first <= key <= (min(last, place) if causal else last) for key in range(seqlen_k)])
    return torch.tensor(rows, dtype=torch.bool).reshape(seqlen_q, seqlen_k)


def assert_close_to_oracle(
    result: Tensor,
    oracle: Tensor,
    plain: Tensor,
    what: str = "output",
    *,
    largest_gradient: float | None = None,
    declared: float = 1.0,
) -> None:
    """The precision rule (`hal_attn.testing.precision`)."""
    found = compare(result, oracle, plain, largest_gradient=largest_gradient, declared=declared)
    assert found.ok, f"{what}: {found}"


def backends_that_take(query: Tensor, key: Tensor, value: Tensor, **options: object) -> tuple[str, ...]:
    """Names of the backends that refuse nothing of this call, best first; never none."""
    options.pop("backend", None)
    considered = explain(query, key, value, **options).considered
    names = tuple(backend.name for backend, refusals in considered if not refusals)
    assert names, "no backend takes the call"
    return names


def call(query: Tensor, key: Tensor, value: Tensor, **options: object) -> object:
    """`varlen_attention` for packed tensors, `attention` for batched ones."""
    function = varlen_attention if query.dim() == 3 else attention
    return function(query, key, value, **options)  # type: ignore[operator]


def assert_right(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gradients: bool = True,
    sequences: PackedSequences | None = None,
    **options: object,
) -> tuple[str, ...]:
    """Output, LSE and gradients of this call are right by default dispatch and on every backend that takes it.

    Returns:
        The names of the backends checked, so that a test can also say which it means.
    """
    right = expected(query, key, value, sequences=sequences, **options)
    if sequences is not None:
        options["sequences"] = sequences
    takers = backends_that_take(query, key, value, **options)
    for name in (None, *takers):
        _assert_forward(right, name, (query, key, value), options)
        if gradients:
            _assert_gradients(right, name, (query, key, value), options)
    return takers


def _assert_forward(right: Expected, name: str | None, inputs: Tensors, options: dict[str, object]) -> None:
    with torch.no_grad():
        output = call(*inputs, backend=name, **options)
        assert isinstance(output, Tensor)
        assert output.dtype == inputs[0].dtype
        assert_close_to_oracle(output, right.output, right.plain_output, f"{name}: output")
        if name is not None and name not in backends_that_take(*inputs, return_lse=True, **options):
            return
        with_lse = call(*inputs, backend=name, return_lse=True, **options)
        assert isinstance(with_lse, tuple)
        assert with_lse[1].dtype == torch.float32
        assert_close_to_oracle(with_lse[0], right.output, right.plain_output, f"{name}: output beside the LSE")
        assert_close_to_oracle(with_lse[1], right.lse, right.plain_lse, f"{name}: LSE")


def _assert_gradients(right: Expected, name: str | None, inputs: Tensors, options: dict[str, object]) -> None:
    leaves = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
    if name is not None and name not in backends_that_take(*leaves, **options):
        return
    output = call(*leaves, backend=name, **options)
    assert isinstance(output, Tensor)
    found = torch.autograd.grad((output * right.weight).sum(), leaves)
    for which, have, exact, plain in zip(
        ("query", "key", "value"), found, right.gradients, right.plain_gradients, strict=True
    ):
        assert_close_to_oracle(
            have, exact, plain, f"{name}: gradient of {which}", largest_gradient=right.largest_gradient
        )
