"""The causal triangle ends at the last query and the last key, whatever the lengths, batched and packed."""

import math

import pytest
import torch

from hal_attn import attention, varlen_attention
from tests.support import DTYPES, assert_right, backends_that_take, dense, packed, randn

LENGTHS = [(1, 7), (4, 4), (3, 8), (6, 2), (1, 1), (9, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_batched_triangle_is_bottom_right(seqlen_q, seqlen_k, dtype):
    assert_right(*dense(2, seqlen_q, seqlen_k, kv_heads=2, dtype=dtype, seed=1), causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_triangle_is_bottom_right_in_every_sequence(dtype):
    query, key, value, sequences = packed([1, 4, 3, 5], [6, 2, 3, 7], dtype=dtype, seed=2)
    assert_right(query, key, value, sequences=sequences, causal=True)


def test_the_triangle_counted_by_hand():
    # Scores are all 0, so each query gives the mean of the values it sees: 0, 1, 2, 3, 4.
    value = torch.arange(5.0).view(1, 5, 1, 1)
    query, key = torch.zeros(1, 3, 1, 1), torch.zeros(1, 5, 1, 1)
    output, lse = attention(query, key, value, causal=True, return_lse=True)
    torch.testing.assert_close(output.flatten(), torch.tensor([1.0, 1.5, 2.0]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([3.0, 4.0, 5.0]).log())


def test_queries_before_the_first_key_see_nothing():
    query, key, value = dense(1, 6, 2)
    for backend in backends_that_take(query, key, value, causal=True, return_lse=True):
        output, lse = attention(query, key, value, causal=True, return_lse=True, backend=backend)
        assert not output[:, :4].any()
        assert (lse[..., :4] == -math.inf).all()
        torch.testing.assert_close(output[:, 4], value[:, 0])


@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_no_path_drops_the_causal_flag(seqlen_q):
    query, key, value = dense(1, seqlen_q, 4, seed=3)
    changed = value.clone()
    changed[:, -1] += 100.0
    for backend in backends_that_take(query, key, value, causal=True):
        before = attention(query, key, value, causal=True, backend=backend)
        after = attention(query, key, changed, causal=True, backend=backend)
        assert torch.equal(before[:, :-1], after[:, :-1]), backend
        assert not torch.equal(before[:, -1], after[:, -1]), backend


@pytest.mark.parametrize("scale", [0.0, -0.5], ids=["zero", "negative"])
@pytest.mark.parametrize("layout", ["batched", "packed"])
def test_a_scale_that_is_not_positive_hides_the_same_keys(scale, layout):
    if layout == "batched":
        assert_right(*dense(2, 5, seed=4), causal=True, scale=scale, gradients=scale != 0.0)
    else:
        query, key, value, sequences = packed([5, 3, 4], seed=4)
        assert_right(query, key, value, sequences=sequences, causal=True, scale=scale, gradients=scale != 0.0)


def test_decoding_one_token_at_a_time_equals_the_whole():
    query, key, value = dense(2, 6, kv_heads=2, seed=5)
    whole = attention(query, key, value, causal=True)
    steps = [attention(query[:, i : i + 1], key[:, : i + 1], value[:, : i + 1], causal=True) for i in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_a_packed_prompt_next_to_a_decoded_token():
    query = randn(1 + 4, 2, 8, seed=6)
    key, value = randn(7 + 4, 2, 8, seed=7), randn(7 + 4, 2, 8, seed=8)
    offsets, offsets_k = torch.tensor([0, 1, 5]), torch.tensor([0, 7, 11])
    output = varlen_attention(query, key, value, cu_seqlens=offsets, cu_seqlens_k=offsets_k, causal=True)
    torch.testing.assert_close(output[:1], attention(query[None, :1], key[None, :7], value[None, :7])[0])
    prompt = attention(query[None, 1:], key[None, 7:], value[None, 7:], causal=True)[0]
    torch.testing.assert_close(output[1:], prompt)
