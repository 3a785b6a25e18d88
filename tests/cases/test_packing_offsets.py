"""Packed sequences: offsets that cannot be right are refused, and sequences never see each other."""

import pytest
import torch

from hal_attn import InvalidAttentionInputError, PackedSequences, attention, varlen_attention
from tests.support import DTYPES, assert_right, backends_that_take, packed, randn

OFFSETS = torch.tensor([0, 3, 7], dtype=torch.int32)
WRONG_OFFSETS = {
    "end before the last row": [0, 3, 6],
    "end after the last row": [0, 3, 8],
    "no leading zero": [3, 7],
    "start after the first row": [1, 3, 7],
    "lengths in place of offsets": [3, 4],
    "fall": [0, 5, 3, 7],
}


@pytest.mark.parametrize("offsets", WRONG_OFFSETS.values(), ids=WRONG_OFFSETS)
@pytest.mark.parametrize("side", ["cu_seqlens", "cu_seqlens_k"])
def test_offsets_that_do_not_cover_the_rows_are_refused_by_name(offsets, side):
    query, key, value, _ = packed([3, 4])
    given = {"cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS, side: torch.tensor(offsets, dtype=torch.int32)}
    with pytest.raises(InvalidAttentionInputError, match="cu_seqlens"):
        varlen_attention(query, key, value, **given)


@pytest.mark.parametrize("lengths", [[4, 2], [4, 4]], ids=["too few rows", "too many rows"])
@pytest.mark.parametrize("side", ["query", "key"])
def test_a_call_remembered_for_right_offsets_does_not_let_wrong_ones_of_the_same_shape_through(lengths, side):
    query, key, value, _ = packed([4, 3])
    right, wrong = ([4, 3], lengths) if side == "key" else (lengths, [4, 3])
    varlen_attention(query, key, value, sequences=PackedSequences.from_lengths([4, 3], [4, 3]))
    varlen_attention(query, key, value, sequences=PackedSequences.from_lengths([4, 3], [3, 4]))
    with pytest.raises(InvalidAttentionInputError, match="token count"):
        varlen_attention(query, key, value, sequences=PackedSequences.from_lengths(right, wrong))


@pytest.mark.parametrize(
    "offsets",
    [OFFSETS.float(), OFFSETS.bool(), OFFSETS[None], OFFSETS[:0], [0, 3, 7]],
    ids=["float", "bool", "two dimensions", "no element", "list"],
)
def test_what_cannot_be_offsets_is_refused_by_name(offsets):
    query, key, value, _ = packed([3, 4])
    with pytest.raises(InvalidAttentionInputError, match="cu_seqlens"):
        varlen_attention(query, key, value, cu_seqlens=offsets)


def test_offsets_on_another_device_are_refused_with_the_device():
    query, key, value, _ = packed([3, 4])
    with pytest.raises(InvalidAttentionInputError, match="device meta"):
        varlen_attention(query, key, value, cu_seqlens=OFFSETS.to("meta"))


def test_another_number_of_key_sequences_is_refused():
    query, key, value, _ = packed([3, 4])
    with pytest.raises(InvalidAttentionInputError, match="cu_seqlens_k"):
        varlen_attention(query, key, value, cu_seqlens=OFFSETS, cu_seqlens_k=torch.tensor([0, 1, 2, 7]))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_offsets_in_other_integer_types_give_the_same_as_int32(dtype):
    query, key, value, _ = packed([3, 4])
    expected = varlen_attention(query, key, value, cu_seqlens=OFFSETS, causal=True)
    assert torch.equal(varlen_attention(query, key, value, cu_seqlens=OFFSETS.to(dtype), causal=True), expected)


def test_int64_offsets_beyond_int32_are_not_wrapped_into_right_ones():
    query, key, value, _ = packed([3, 4])
    with pytest.raises(InvalidAttentionInputError, match="cu_seqlens"):
        varlen_attention(query, key, value, cu_seqlens=torch.tensor([0, 3, 2**32 + 7]))


@pytest.mark.parametrize("longest", [4, torch.tensor(4), 100], ids=["exact", "a 0-d tensor", "a bound"])
def test_a_longest_length_that_holds_changes_nothing(longest):
    query, key, value, _ = packed([3, 4])
    expected = varlen_attention(query, key, value, cu_seqlens=OFFSETS)
    assert torch.equal(varlen_attention(query, key, value, cu_seqlens=OFFSETS, max_seqlen=longest), expected)


@pytest.mark.parametrize("name", ["max_seqlen", "max_seqlen_k"])
@pytest.mark.parametrize("wrong", [3, 4.0, -1, True], ids=["too small", "float", "negative", "bool"])
def test_a_longest_length_that_cannot_be_is_refused_and_truncates_nothing(name, wrong):
    query, key, value, _ = packed([3, 4])
    with pytest.raises(InvalidAttentionInputError, match=name):
        varlen_attention(query, key, value, cu_seqlens=OFFSETS, cu_seqlens_k=OFFSETS, **{name: wrong})


def test_host_offsets_never_reach_past_the_tensor():
    query, key, value, _ = packed([3, 4])
    varlen_attention(query, key, value, cu_seqlens=OFFSETS, cu_seqlens_host=[0, 3, 7])
    with pytest.raises(InvalidAttentionInputError, match="cu_seqlens"):
        varlen_attention(query, key, value, cu_seqlens=OFFSETS, cu_seqlens_host=[0, 4, 8])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "lengths_k"),
    [
        ([4, 2, 5, 3], None),
        ([1, 0, 1, 1, 0], [4, 0, 2, 3, 0]),
        ([0, 3, 2, 0], [4, 3, 2, 5]),
        ([3, 2, 1], [0, 4, 0]),
        ([0, 0], [3, 0]),
        ([2], None),
    ],
    ids=["many", "empty ones", "keys without queries", "queries without keys", "no query at all", "one"],
)
def test_each_sequence_is_answered_alone(lengths, lengths_k, causal, dtype):
    query, key, value, sequences = packed(lengths, lengths_k, heads=6, kv_heads=2, dtype=dtype, seed=1)
    assert_right(query, key, value, sequences=sequences, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_what_one_sequence_holds_changes_no_bit_of_its_neighbours(causal):
    query, key, value, sequences = packed([4, 2, 5, 3], seed=2)
    other_key, other_value = key.clone(), value.clone()
    other_key[4:6], other_value[4:6] = 50.0, -50.0
    for backend in backends_that_take(query, key, value, sequences=sequences, causal=causal):
        options = {"sequences": sequences, "causal": causal, "backend": backend}
        before = varlen_attention(query, key, value, **options)
        after = varlen_attention(query, other_key, other_value, **options)
        changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [4, 5], backend


def test_keys_of_a_sequence_without_queries_get_a_gradient_of_exactly_zero():
    query, key, value, sequences = packed([0, 3, 2, 0], [4, 3, 2, 5], kv_heads=1)
    for backend in backends_that_take(query, key, value, sequences=sequences):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = varlen_attention(*leaves, sequences=sequences, backend=backend)
        _, grad_key, grad_value = torch.autograd.grad(output.sum(), leaves)
        unused = torch.tensor([True] * 4 + [False] * 5 + [True] * 5)
        for gradient in (grad_key, grad_value):
            assert not gradient[unused].any(), backend
        assert grad_value[~unused].any(), backend


def test_packed_and_batched_calls_agree_on_equal_lengths():
    query, key, value, sequences = packed([4, 4, 4], seed=4)
    batch = [tensor.unflatten(0, (3, 4)) for tensor in (query, key, value)]
    for backend in backends_that_take(query, key, value, sequences=sequences):
        rows = varlen_attention(query, key, value, sequences=sequences, backend=backend)
        torch.testing.assert_close(rows, attention(*batch, backend=backend).flatten(0, 1), rtol=0, atol=1e-6)


def test_one_key_a_sequence_gives_its_value():
    query, key, value, sequences = packed([2, 1, 3], [1, 1, 1], value_head_dim=8)
    for backend in backends_that_take(query, key, value, sequences=sequences):
        output = varlen_attention(query, key, value, sequences=sequences, backend=backend)
        torch.testing.assert_close(output, value[[0, 0, 1, 2, 2, 2]])


def test_no_rows_at_all_give_an_empty_answer():
    empty = randn(0, 4, 16, seed=0)
    output, lse = varlen_attention(empty, empty, empty, cu_seqlens=torch.zeros(1, dtype=torch.int32), return_lse=True)
    assert output.shape == (0, 4, 16)
    assert lse.shape == (4, 0)
