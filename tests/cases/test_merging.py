"""Partial results joined: by their weights, whatever an empty part holds, in any order, at any cut."""

import math
from itertools import pairwise

import pytest
import torch

from hal_attn import InvalidAttentionInputError, attention, merge_attention_states, reference_attention
from tests.support import DTYPES, backends_that_take, dense, randn

CUTS = [(0, 4, 9), (0, 2, 5, 9), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), (0, 0, 9), (0, 9)]


def parts_of(query, key, value, cuts, **options):
    parts = [
        attention(query, key[:, begin:end], value[:, begin:end], return_lse=True, **options)
        for begin, end in pairwise(cuts)
    ]
    return [output for output, _ in parts], [lse for _, lse in parts]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_any_cut_of_the_keys_gives_attention_over_all_of_them(cuts):
    query, key, value = dense(2, 3, 9, kv_heads=2, seed=1)
    right, right_lse = reference_attention(query, key, value)
    for backend in backends_that_take(query, key, value, return_lse=True):
        output, lse = merge_attention_states(*parts_of(query, key, value, cuts, backend=backend))
        torch.testing.assert_close(output.double(), right, rtol=0, atol=2e-6, msg=backend)
        torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=2e-6, msg=backend)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_the_order_of_the_parts_only_rounds(cuts):
    query, key, value = dense(2, 3, 9, seed=2)
    outputs, lses = parts_of(query, key, value, cuts)
    there, back = merge_attention_states(outputs, lses), merge_attention_states(outputs[::-1], lses[::-1])
    for one, other in zip(there, back, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_two_parts_by_hand():
    # Denominators e^0 = 1 and 3: weights 1/4 and 3/4, the LSE is log 4 and no sum of the two.
    outputs = [torch.full((1, 1, 1), 8.0), torch.full((1, 1, 1), 4.0)]
    output, lse = merge_attention_states(outputs, [torch.zeros(1, 1), torch.full((1, 1), math.log(3.0))])
    assert output.item() == pytest.approx(5.0)
    assert lse.item() == pytest.approx(math.log(4.0))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 0.0, 1e30], ids=str)
@pytest.mark.parametrize("first", [False, True], ids=["empty last", "empty first"])
@pytest.mark.parametrize("layout", ["batched", "packed"])
def test_an_empty_part_has_no_weight_whatever_it_holds(garbage, first, layout):
    shape, lse_shape = ((2, 3, 4, 8), (2, 4, 3)) if layout == "batched" else ((3, 4, 8), (4, 3))
    part = randn(*shape, seed=3), randn(*lse_shape, seed=4)
    empty = torch.full(shape, garbage), torch.full(lse_shape, -math.inf)
    order = [empty, part] if first else [part, empty]
    output, lse = merge_attention_states([o for o, _ in order], [part_lse for _, part_lse in order])
    assert torch.equal(output, part[0])
    assert torch.equal(lse, part[1])


def test_some_empty_rows_of_a_part_leave_the_others_alone():
    outputs = [randn(1, 3, 2, 8, seed=5), randn(1, 3, 2, 8, seed=6)]
    lses = [randn(1, 2, 3, seed=7), randn(1, 2, 3, seed=8)]
    expected, expected_lse = merge_attention_states(outputs, lses)
    outputs[1][:, 1], lses[1][..., 1] = math.nan, -math.inf
    output, lse = merge_attention_states(outputs, lses)
    assert torch.equal(output[:, [0, 2]], expected[:, [0, 2]])
    assert torch.equal(lse[..., [0, 2]], expected_lse[..., [0, 2]])
    assert torch.equal(output[:, 1], outputs[0][:, 1])


def test_only_empty_parts_give_zero_and_minus_infinity():
    outputs, lses = [torch.full((3, 2, 8), math.nan)] * 2, [torch.full((2, 3), -math.inf)] * 2
    output, lse = merge_attention_states(outputs, lses)
    assert not output.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_keep_their_dtype_and_are_added_in_at_least_float32(dtype):
    outputs = [randn(1, 4, 2, 8, seed=seed, dtype=dtype) for seed in range(16)]
    lses = [randn(1, 2, 4, seed=50 + seed) for seed in range(16)]
    output, lse = merge_attention_states(outputs, lses)
    exact, exact_lse = merge_attention_states([o.double() for o in outputs], [part.double() for part in lses])
    assert (output.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    assert (output.double() - exact).abs().max() <= (exact.to(dtype).double() - exact).abs().max() + 1e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-6)


def test_very_different_weights_neither_overflow_nor_vanish():
    outputs = [torch.full((1, 1, 1), 1.0), torch.full((1, 1, 1), 2.0)]
    for large in (1e4, -1e4):
        output, lse = merge_attention_states(outputs, [torch.full((1, 1), large), torch.full((1, 1), large)])
        assert output.item() == pytest.approx(1.5)
        assert lse.item() == pytest.approx(large + math.log(2.0))
    output, lse = merge_attention_states(outputs, [torch.full((1, 1), -1e4), torch.full((1, 1), 1e4)])
    assert (output.item(), lse.item()) == (2.0, 1e4)


def test_gradients_flow_through_outputs_and_weights_and_none_from_an_empty_part():
    outputs = [randn(2, 1, 3, seed=seed, dtype=torch.float64).requires_grad_() for seed in (9, 10)]
    lses = [randn(1, 2, seed=seed, dtype=torch.float64).requires_grad_() for seed in (11, 12)]
    assert torch.autograd.gradcheck(lambda *x: merge_attention_states(x[:2], x[2:]), (*outputs, *lses))
    empty = torch.full((2, 1, 3), math.nan).requires_grad_()
    nothing = torch.full((1, 2), -math.inf).requires_grad_()
    part, weight = randn(2, 1, 3, seed=13).requires_grad_(), randn(1, 2, seed=14).requires_grad_()
    output, lse = merge_attention_states([part, empty], [weight, nothing])
    gradients = torch.autograd.grad(output.sum() + lse.sum(), (part, weight, empty, nothing))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[2].any()


@pytest.mark.parametrize(
    ("outputs", "lses", "name"),
    [
        ([], [], "outputs"),
        ([torch.ones(3, 2, 8)], [], "lses"),
        ([torch.ones(3, 2, 8)], [torch.ones(3, 2)], "lses"),
        ([torch.ones(3, 2, 8)], [torch.ones(2, 3, dtype=torch.bfloat16)], "lses"),
        ([torch.ones(3, 2, 8), torch.ones(4, 2, 8)], [torch.ones(2, 3)] * 2, "outputs"),
    ],
    ids=["no part", "no LSE", "tokens by heads", "an LSE in half precision", "parts of other rows"],
)
def test_parts_that_do_not_fit_are_refused_by_name(outputs, lses, name):
    with pytest.raises(InvalidAttentionInputError, match=name):
        merge_attention_states(outputs, lses)
