"""The LSE: natural log of the whole denominator, one layout on every backend, no padding in it."""

import math

import pytest
import torch

from hal_attn import UnsupportedAttentionError, attention, reference_attention, varlen_attention
from tests.support import DTYPES, assert_right, backends_that_take, dense, packed, randn


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softcap": 1.5}, {"scale": 0.5}, {"window_size": (1, 1)}], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_lse_holds_every_option(options, dtype):
    assert_right(*dense(2, 4, heads=2, kv_heads=1, dtype=dtype, seed=1, spread=2.0), gradients=False, **options)


@pytest.mark.parametrize("lengths_k", [None, [4, 1, 6], [4, 0, 6]])
def test_packed_lse_is_heads_by_tokens_without_padding(lengths_k):
    query, key, value, sequences = packed([2, 5, 3], lengths_k, seed=2)
    assert_right(query, key, value, sequences=sequences, gradients=False)
    for backend in backends_that_take(query, key, value, sequences=sequences, return_lse=True):
        lse = varlen_attention(query, key, value, sequences=sequences, return_lse=True, backend=backend)[1]
        assert lse.shape == (4, 10), backend


def test_the_log_is_natural():
    # Eight keys with a score of 0: log 8, which is 3 in base 2.
    query, key, value = torch.zeros(1, 1, 1, 4), torch.zeros(1, 8, 1, 4), randn(1, 8, 1, 4, seed=3)
    for backend in backends_that_take(query, key, value, return_lse=True):
        lse = attention(query, key, value, return_lse=True, backend=backend)[1]
        torch.testing.assert_close(lse, torch.full((1, 1, 1), math.log(8.0)), msg=backend)


def test_the_lse_is_that_of_scaled_scores():
    query, key, value = torch.full((1, 1, 1, 4), 3.0), torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
    for backend in backends_that_take(query, key, value, return_lse=True):
        assert attention(query, key, value, return_lse=True, backend=backend)[1].item() == pytest.approx(6.0)


def test_a_sink_is_in_the_lse_and_alone_where_no_key_is_seen():
    query, key, value = dense(1, 3, 1, heads=2, seed=4)
    sinks = torch.tensor([0.5, -2.0])
    assert_right(query, key, value, sinks=sinks, causal=True)
    output, lse = attention(query, key, value, sinks=sinks, causal=True, return_lse=True)
    assert lse[0, :, 0].tolist() == sinks.tolist()
    assert not output[0, 0].any()


def test_asking_for_the_lse_does_not_change_the_output():
    query, key, value = dense(2, 5, seed=5)
    for backend in backends_that_take(query, key, value, return_lse=True):
        alone = attention(query, key, value, backend=backend)
        beside = attention(query, key, value, return_lse=True, backend=backend)[0]
        torch.testing.assert_close(alone, beside, rtol=0, atol=1e-6, msg=backend)


def test_a_gradient_through_the_lse_is_right_or_refused_and_never_lost():
    query, key, value = (tensor.requires_grad_() for tensor in dense(1, 4, 6, seed=6))
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key)]
    right = torch.autograd.grad(reference_attention(*exact, value.detach())[1].sin().sum(), exact)
    takers = backends_that_take(query, key, value, return_lse=True)
    for backend in backends_that_take(query.detach(), key.detach(), value.detach(), return_lse=True):
        if backend in takers:
            lse = attention(query, key, value, return_lse=True, backend=backend)[1]
            found = torch.autograd.grad(lse.sin().sum(), (query, key))
            for have, need in zip(found, right, strict=True):
                torch.testing.assert_close(have.double(), need, rtol=0, atol=1e-6, msg=backend)
        else:
            with pytest.raises(UnsupportedAttentionError, match="return_lse"):
                attention(query, key, value, return_lse=True, backend=backend)
