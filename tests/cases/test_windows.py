"""Sliding windows: inclusive on both sides, aligned to the bottom right, and every spelling of causal is one."""

import pytest
import torch

from hal_attn import InvalidAttentionInputError, attention
from tests.support import DTYPES, assert_right, dense, packed, visible_pairs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [(2, 1), (0, 0), (0, None), (-1, 2), (3, 0), (None, None), (1, 40)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_batched_windows(window, causal, dtype):
    assert_right(*dense(2, 5, 8, kv_heads=2, dtype=dtype, seed=1), window_size=window, causal=causal)


@pytest.mark.parametrize("window", [(2, 1), (0, 0), (1, -1), (4, 0)], ids=str)
@pytest.mark.parametrize("lengths_k", [None, [8, 6, 1]], ids=["equal", "other key lengths"])
def test_packed_windows_are_those_of_each_sequence(window, lengths_k):
    query, key, value, sequences = packed([5, 2, 7], lengths_k, seed=2)
    assert_right(query, key, value, sequences=sequences, window_size=window)


def test_the_edges_counted_by_hand():
    # Scores are all 0: query 1 of 3 stands at key 3 of 5 and sees keys 1, 2, 3, 4 by (2, 1).
    assert visible_pairs(3, 5, False, (2, 1)).long().tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    value = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0]).view(1, 5, 1, 1)
    output = attention(torch.zeros(1, 3, 1, 1), torch.zeros(1, 5, 1, 1), value, window_size=(2, 1))
    torch.testing.assert_close(output.flatten(), torch.tensor([1111.0 / 4, 11110.0 / 4, 11100.0 / 3]))


@pytest.mark.parametrize(
    ("window", "causal"),
    [((-1, 0), False), ((None, 0), False), ((6, 0), False), ((5, 0), False), ((-1, -1), True), ((5, 5), True)],
    ids=str,
)
def test_every_spelling_of_causal_is_the_same(window, causal):
    query, key, value = dense(1, 6, seed=3)
    expected = attention(query, key, value, causal=True)
    torch.testing.assert_close(attention(query, key, value, causal=causal, window_size=window), expected)


@pytest.mark.parametrize("window", [(4, 5), (-1, 5), (5, 5), (100, 100)], ids=str)
def test_a_window_as_wide_as_the_keys_hides_nothing_and_one_less_hides_one(window):
    query, key, value = dense(1, 6, 5, seed=4)
    torch.testing.assert_close(attention(query, key, value, window_size=window), attention(query, key, value))
    assert_right(query, key, value, window_size=(3, 4))


@pytest.mark.parametrize("window", [(-2, 0), (1.0, 0), (True, 0), (1,), 3, "ab"], ids=str)
def test_what_is_no_window_is_refused_by_name(window):
    with pytest.raises(InvalidAttentionInputError, match="window_size"):
        attention(*dense(1, 3), window_size=window)


def test_a_float_edge_is_refused_after_the_same_whole_number_was_taken():
    query, key, value = dense(1, 5, seed=5)
    attention(query, key, value, window_size=(2, 1))
    with pytest.raises(InvalidAttentionInputError, match="window_size"):
        attention(query, key, value, window_size=(2.0, 1))
