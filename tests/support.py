"""What all tests share: seeded tensors, attention in plain PyTorch, the precision rule, and the backends of a call.

The precision rule (docs/semantics.md): the error against float64 is at most twice that of the same computation by plain
PyTorch in the same dtype, plus one unit in the last place of the output. The error is the largest over the tensor.
For gradients it is the root mean square, and there are four units, of the largest gradient of the call: a backward pass
that recomputes its weights rounds once more than the plain one, and that stays where the terms of a gradient cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hal_attn import (
    PackedSequences,
    attention,
    explain,
    reference_attention,
    reference_varlen_attention,
    varlen_attention,
)
from tests.plain import plain_attention

CPU_BACKENDS = ("cpu_flash", "cpu_sdpa", "cpu_math")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ORACLE_UNITS = 16
GRADIENT_UNITS = 4
Tensors = tuple[Tensor, Tensor, Tensor]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
    """Normal numbers from a generator of their own: the same for the same seed, in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(dtype)


def dense(
    batch: int = 2,
    seqlen_q: int = 5,
    seqlen_k: int | None = None,
    *,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 16,
    value_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 1.0,
) -> Tensors:
    """Query `[B, Sq, H, D]`, key `[B, Sk, Hkv, D]`, value `[B, Sk, Hkv, Dv]`; `spread` widens queries and keys."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    kv_heads = heads if kv_heads is None else kv_heads
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    return (
        randn(batch, seqlen_q, heads, head_dim, seed=3 * seed, dtype=dtype, spread=spread),
        randn(batch, seqlen_k, kv_heads, head_dim, seed=3 * seed + 1, dtype=dtype, spread=spread),
        randn(batch, seqlen_k, kv_heads, value_head_dim, seed=3 * seed + 2, dtype=dtype),
    )


def packed(
    lengths: Sequence[int], lengths_k: Sequence[int] | None = None, **shape: object
) -> tuple[Tensor, Tensor, Tensor, PackedSequences]:
    """Query `[Tq, H, D]`, key, value and their sequences; `shape` as for `dense`."""
    tokens_k = sum(lengths if lengths_k is None else lengths_k)
    query, key, value = dense(1, sum(lengths), tokens_k, **shape)  # type: ignore[arg-type]
    return query[0], key[0], value[0], PackedSequences.from_lengths(lengths, lengths_k)


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


def plain_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, **options: object
) -> tuple[Tensor, Tensor]:
    """`plain_attention` one sequence at a time: output `[Tq, H, Dv]`, LSE `[H, Tq]`."""
    slopes = options.pop("alibi_slopes", None)
    rows = query.split(sequences.lengths), key.split(sequences.lengths_k), value.split(sequences.lengths_k)
    outputs, lses = [], []
    for index, (q, k, v) in enumerate(zip(*rows, strict=True)):
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[index]
        output, lse = plain_attention(q[None], k[None], v[None], alibi_slopes=own, **options)  # type: ignore[arg-type]
        outputs.append(output[0])
        lses.append(lse[0])
    if not outputs:
        return query.new_zeros(0, query.shape[1], value.shape[2]), query.new_zeros(query.shape[1], 0).float()
    return torch.cat(outputs), torch.cat(lses, 1)


def unit_in_last_place(largest: float, dtype: torch.dtype) -> float:
    """The spacing of `dtype` at `largest`."""
    info = torch.finfo(dtype)
    if largest < info.tiny:
        return info.tiny * info.eps
    return info.eps * 2.0 ** math.floor(math.log2(largest))


def assert_close_to_oracle(
    result: Tensor, oracle: Tensor, plain: Tensor, what: str = "output", *, largest_gradient: float | None = None
) -> None:
    """The precision rule, with the same shape, -inf in the same places, and nothing else that is not finite."""
    assert result.shape == oracle.shape, f"{what}: shape {tuple(result.shape)}, right is {tuple(oracle.shape)}"
    if not result.numel():
        return
    hidden = torch.isneginf(oracle)
    assert torch.equal(torch.isneginf(result), hidden), f"{what}: -inf in other places than the oracle"
    exact = oracle.detach().double().masked_fill(hidden, 0.0)
    have = result.detach().double().masked_fill(hidden, 0.0)
    assert torch.isfinite(have).all(), f"{what}: {int((~torch.isfinite(have)).sum())} values are not finite"
    simple = plain.detach().double().masked_fill(hidden, 0.0)
    # The oracle has no more digits than a float64 result, so its own rounding has to be allowed there.
    units = ORACLE_UNITS if oracle.dtype == result.dtype else 1 if largest_gradient is None else GRADIENT_UNITS
    unit = unit_in_last_place(exact.abs().max().item() if largest_gradient is None else largest_gradient, result.dtype)
    allowed = 2 * _size(simple - exact, largest_gradient is not None) + units * unit
    error = _size(have - exact, largest_gradient is not None)
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def _size(errors: Tensor, root_mean_square: bool) -> float:
    return (errors.square().mean().sqrt() if root_mean_square else errors.abs().max()).item()


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


@dataclass(frozen=True)
class Expected:
    """The right answer to a call by the oracle and by plain PyTorch: outputs, LSEs and gradients of query, key, value
    for the loss `sum(output * weight)`."""

    output: Tensor
    lse: Tensor
    gradients: Tensors
    plain_output: Tensor
    plain_lse: Tensor
    plain_gradients: Tensors
    weight: Tensor


def expected(
    query: Tensor, key: Tensor, value: Tensor, *, sequences: PackedSequences | None = None, **options: object
) -> Expected:
    """Computes `Expected` for a call; `sequences` for packed tensors."""
    inputs = (query, key, value)
    extra = () if sequences is None else (sequences,)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    own = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
    oracle = reference_attention if sequences is None else reference_varlen_attention
    plain = plain_attention if sequences is None else plain_varlen_attention
    output, lse = oracle(*exact, *extra, **options)
    plain_output, plain_lse = plain(*own, *extra, **options)
    weight = randn(*output.shape, seed=99, dtype=query.dtype)
    return Expected(
        output.detach(),
        lse.detach(),
        _gradients(output, weight.double(), exact),
        plain_output.detach(),
        plain_lse.detach(),
        _gradients(plain_output, weight, own),
        weight,
    )


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
    largest = max((gradient.abs().max().item() for gradient in right.gradients if gradient.numel()), default=0.0)
    for which, have, exact, plain in zip(
        ("query", "key", "value"), found, right.gradients, right.plain_gradients, strict=True
    ):
        assert_close_to_oracle(have, exact, plain, f"{name}: gradient of {which}", largest_gradient=largest)


def _gradients(output: Tensor, weight: Tensor, inputs: tuple[Tensor, ...]) -> Tensors:
    if not output.requires_grad:
        found = tuple(torch.zeros_like(tensor) for tensor in inputs)
    else:
        loss = (output * weight).sum()
        found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return found  # type: ignore[return-value]
