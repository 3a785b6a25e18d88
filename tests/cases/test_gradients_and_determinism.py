"""Gradients are there or refused, repeats are equal to the bit, dropout obeys its seed, compiled calls stay right."""

import pytest
import torch

from hal_attn import UnsupportedAttentionError, attention, reference_attention, varlen_attention
from tests.support import CPU_BACKENDS, DTYPES, backends_that_take, dense, packed, randn


def leaves_of(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)], ids=["query", "key", "value", "all"])
@pytest.mark.parametrize("layout", ["batched", "packed"])
def test_the_graph_is_kept_for_whichever_input_wants_it(wanted, layout):
    *tensors, sequences = packed([3, 2], kv_heads=2, seed=1)
    options = {"sequences": sequences} if layout == "packed" else {}
    if layout == "batched":
        tensors = [tensor[None] for tensor in tensors]
    function = varlen_attention if layout == "packed" else attention
    tensors = [tensor.requires_grad_(index in wanted) for index, tensor in enumerate(tensors)]
    for backend in backends_that_take(*tensors, **options):
        output = function(*tensors, backend=backend, **options)
        assert output.requires_grad, backend
        gradients = torch.autograd.grad(output.square().sum(), [tensors[index] for index in wanted])
        assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients), backend


def test_an_inference_call_before_does_not_lose_the_graph_after():
    query, key, value = leaves_of(*dense(1, 4, seed=2))
    with torch.no_grad():
        assert not attention(query, key, value).requires_grad
    assert attention(query, key, value).requires_grad
    assert not attention(query.detach(), key.detach(), value.detach()).requires_grad


@pytest.mark.parametrize("name", ["mask", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("causal", [False, True])
def test_an_option_that_wants_a_gradient_gets_it_or_is_refused(name, causal):
    query, key, value = dense(1, 4, seed=3)
    option = randn(*((1, 1, 4, 4) if name == "mask" else (4,)), seed=4).abs().requires_grad_()
    exact = option.detach().double().requires_grad_()
    right = reference_attention(query, key, value, causal=causal, **{name: exact})[0].square().sum()
    (right_gradient,) = torch.autograd.grad(right, exact)
    takers = backends_that_take(query, key, value, causal=causal, **{name: option})
    for backend in CPU_BACKENDS:
        if backend in takers:
            output = attention(query, key, value, causal=causal, backend=backend, **{name: option})
            (gradient,) = torch.autograd.grad(output.square().sum(), option)
            torch.testing.assert_close(gradient.double(), right_gradient, rtol=1e-5, atol=1e-5, msg=backend)
        else:
            with pytest.raises(UnsupportedAttentionError, match=name):
                attention(query, key, value, causal=causal, backend=backend, **{name: option})


@pytest.mark.parametrize("strange", ["expanded", "transposed", "every other"])
def test_gradients_that_arrive_in_another_memory_order(strange):
    query, key, value = dense(2, 5, seed=5)
    arriving = {
        "expanded": torch.ones(1).expand(2, 5, 4, 16),
        "transposed": randn(16, 2, 5, 4, seed=6).movedim(0, -1),
        "every other": randn(2, 5, 4, 32, seed=7)[..., ::2],
    }[strange]
    exact = leaves_of(query.double(), key.double(), value.double())
    right = torch.autograd.grad(reference_attention(*exact)[0], exact, arriving.double())
    for backend in backends_that_take(query, key, value):
        leaves = leaves_of(query, key, value)
        found = torch.autograd.grad(attention(*leaves, backend=backend), leaves, arriving)
        for have, need in zip(found, right, strict=True):
            torch.testing.assert_close(have.double(), need, rtol=0, atol=5e-6, msg=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["batched", "packed"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.3}], ids=str)
def test_deterministic_repeats_are_equal_to_the_bit(dtype, layout, options):
    *tensors, sequences = packed([9, 4], kv_heads=2, dtype=dtype, seed=8)
    given = {"deterministic": True, **options}
    if layout == "packed":
        given["sequences"] = sequences
    else:
        tensors = [tensor[None] for tensor in tensors]
    function = varlen_attention if layout == "packed" else attention
    for backend in backends_that_take(*leaves_of(*tensors), **given):
        runs = []
        for _ in range(3):
            torch.manual_seed(3)
            leaves = leaves_of(*tensors)
            output = function(*leaves, backend=backend, **given)
            runs.append([output, *torch.autograd.grad(output.float().square().sum(), leaves)])
        for again in runs[1:]:
            assert all(torch.equal(one, other) for one, other in zip(runs[0], again, strict=True)), backend


def test_dropout_drops_with_its_probability_and_keeps_the_mean():
    # Equal weights over 64 keys whose values pick them out: a dropped key leaves a 0, a kept one 1/64 over 1 - p.
    query, key = torch.zeros(8, 16, 1, 4), torch.zeros(8, 64, 1, 4)
    value = torch.eye(64).expand(8, 64, 64).unsqueeze(2)
    for backend in backends_that_take(query, key, value, dropout_p=0.25):
        torch.manual_seed(5)
        weights = attention(query, key, value, dropout_p=0.25, backend=backend)
        dropped = (weights == 0).double().mean().item()
        assert dropped == pytest.approx(0.25, abs=0.02), backend
        torch.testing.assert_close(weights[weights > 0], torch.full_like(weights[weights > 0], 1 / 64 / 0.75))


def test_dropout_in_one_call_leaves_no_trace_in_the_next():
    query, key, value = dense(2, 6, seed=9)
    without = attention(query, key, value)
    torch.manual_seed(6)
    first = attention(query, key, value, dropout_p=0.5)
    assert torch.equal(attention(query, key, value), without)
    torch.manual_seed(6)
    assert torch.equal(attention(query, key, value, dropout_p=0.5), first)
    assert not torch.equal(attention(query, key, value, dropout_p=0.5), first)


def test_the_gradient_of_dropout_is_that_of_the_weights_that_were_kept():
    query, key, value = dense(1, 4, 6, heads=2, seed=10)
    for backend in backends_that_take(*leaves_of(query, key, value), dropout_p=0.5):
        leaves = leaves_of(query, key, value)
        torch.manual_seed(7)
        output = attention(*leaves, dropout_p=0.5, backend=backend)
        (grad_value,) = torch.autograd.grad(output.sum(), leaves[2])
        # The output is linear in value: its gradient times value adds up to the output.
        torch.testing.assert_close((grad_value * value).sum(), output.sum().detach(), rtol=1e-4, atol=1e-4, msg=backend)


def test_a_compiled_packed_call_does_not_keep_the_offsets_of_the_first():
    def run(query, key, value, offsets):
        return varlen_attention(query, key, value, cu_seqlens=offsets, causal=True)

    compiled = torch.compile(run, backend="eager", dynamic=True)
    for lengths in ([4, 4], [3, 5], [6, 2], [1, 7]):
        query, key, value, sequences = packed(lengths, seed=11)
        output = compiled(query, key, value, sequences.cu_seqlens)
        torch.testing.assert_close(output, varlen_attention(query, key, value, sequences=sequences, causal=True))
