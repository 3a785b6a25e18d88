"""Dtypes are kept and never reinterpreted, and large scores neither overflow nor lose digits."""

import pytest
import torch

from hal_attn import InvalidAttentionInputError, attention, varlen_attention
from tests.support import DTYPES, assert_close_to_oracle, assert_right, backends_that_take, dense, expected, packed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["batched", "packed"])
def test_the_output_has_the_dtype_of_query_and_the_lse_is_float32(dtype, layout):
    *tensors, sequences = packed([2, 3], dtype=dtype)
    options = {"return_lse": True} if layout == "batched" else {"return_lse": True, "sequences": sequences}
    function = attention if layout == "batched" else varlen_attention
    tensors = [tensor[None] for tensor in tensors] if layout == "batched" else tensors
    for backend in backends_that_take(*tensors, **options):
        output, lse = function(*tensors, backend=backend, **options)
        assert (output.dtype, lse.dtype) == (dtype, torch.float32), backend


@pytest.mark.parametrize("layout", ["batched", "packed"])
def test_float64_has_the_accuracy_of_float64(layout):
    *tensors, sequences = packed([3, 4], dtype=torch.float64, seed=1)
    packed_ones = {"sequences": sequences}
    inputs, options = (tensors, packed_ones) if layout == "packed" else ([t[None] for t in tensors], {})
    right = expected(*inputs, **options, causal=True)
    function = varlen_attention if layout == "packed" else attention
    for backend in backends_that_take(*inputs, causal=True, **options):
        output = function(*inputs, causal=True, backend=backend, **options)
        assert (output - right.output).abs().max() < 1e-14, backend


@pytest.mark.parametrize("name", ["key", "value"])
def test_mixed_dtypes_are_refused_by_name(name):
    query, key, value = dense(1, 3)
    tensors = {"query": query, "key": key, "value": value}
    tensors[name] = tensors[name].to(torch.bfloat16)
    with pytest.raises(InvalidAttentionInputError, match=name):
        attention(**tensors)


def test_whole_numbers_are_refused():
    query = torch.ones(1, 3, 2, 8, dtype=torch.int32)
    with pytest.raises(InvalidAttentionInputError, match="query"):
        attention(query, query, query)


def test_the_same_shapes_in_another_dtype_are_another_call():
    for dtype in (torch.float32, torch.float64, torch.float32):
        assert attention(*dense(1, 3, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_large_scores_are_finite_and_right(dtype, causal):
    query, key, value = dense(1, 6, heads=2, dtype=dtype, seed=2, spread=14.0)
    for backend in assert_right(query, key, value, causal=causal, gradients=False):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = attention(*leaves, causal=causal, backend=backend)
        gradients = torch.autograd.grad(output.sum(), leaves)
        assert all(gradient.isfinite().all() for gradient in gradients), backend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["batched", "packed"])
def test_half_precision_adds_in_more_than_its_own_digits(dtype, layout):
    """Over 600 keys the output is no further from the exact one than twice its own rounding and a little."""
    if layout == "batched":
        inputs, options = dense(1, 8, 600, heads=2, dtype=dtype, seed=3), {}
    else:
        *inputs, sequences = packed([5, 3], [600, 300], heads=2, dtype=dtype, seed=3)
        options = {"sequences": sequences}
    right = expected(*inputs, **options)
    rounding = (right.output.to(dtype).double() - right.output).abs().max()
    function = attention if layout == "batched" else varlen_attention
    for backend in backends_that_take(*inputs, **options):
        output = function(*inputs, backend=backend, **options)
        assert (output.double() - right.output).abs().max() <= 2 * rounding + 2e-4, backend


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, -0.25, 3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_finite_scale_is_a_value(scale, dtype):
    """A scale of 0 weighs all keys alike; it does not mean the default."""
    query, key, value = dense(2, 4, 7, dtype=dtype, seed=4)
    if scale == 0.0:
        for backend in backends_that_take(query, key, value, scale=scale):
            output = attention(query, key, value, scale=scale, backend=backend)
            mean = value.double().mean(1, keepdim=True).expand_as(output)
            assert_close_to_oracle(output, mean, mean.to(dtype), backend)
    else:
        assert_right(query, key, value, scale=scale)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", True, torch.tensor(1.0)], ids=str)
def test_what_is_no_scale_is_refused_by_name(scale):
    with pytest.raises(InvalidAttentionInputError, match="scale"):
        attention(*dense(1, 3), scale=scale)


def test_true_is_no_scale_after_a_call_with_scale_one():
    query, key, value = dense(1, 3)
    attention(query, key, value, scale=1.0)
    with pytest.raises(InvalidAttentionInputError, match="scale"):
        attention(query, key, value, scale=True)


def test_autocast_does_not_change_the_dtype_or_the_digits():
    query, key, value = dense(1, 4, seed=5)
    for backend in backends_that_take(query, key, value):
        outside = attention(query, key, value, backend=backend)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = attention(query, key, value, backend=backend)
        assert torch.equal(outside, inside), backend
