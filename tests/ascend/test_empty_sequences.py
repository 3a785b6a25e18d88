"""Packed sequences without tokens: rejected on Ascend, with both ways on, and answered exactly when asked to."""

import pytest
import torch

from hal_attn import InvalidAttentionInputError, PackedSequences, varlen_attention
from tests.support import assert_right, dense, packed

GENERATIONS = ("Ascend910B1", "Ascend910_9391", "Ascend950DT", "Ascend310P3")


def three(**options):
    query, key, value = (tensor[0] for tensor in dense(1, 7, dtype=torch.float16))
    return varlen_attention(query, key, value, cu_seqlens=torch.tensor([0, 3, 3, 7]), **options)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rejected_by_default(simulate, calls, generation):
    simulate(generation)
    with pytest.raises(InvalidAttentionInputError) as caught:
        three()
    message = str(caught.value)
    assert "sequence 1 with 0 queries and 0 keys" in message
    assert "the platform ascend" in message
    assert "HAL_ATTN_EMPTY_SEQUENCES=compact" in message
    assert "PackedSequences.without_empty()" in message
    assert not calls


@pytest.mark.parametrize("generation", GENERATIONS)
def test_compact_answers_in_one_call(simulate, calls, monkeypatch, generation):
    simulate(generation)
    monkeypatch.setenv("HAL_ATTN_EMPTY_SEQUENCES", "compact")
    compact = three()
    if generation != "Ascend310P3":  # which has no packed operator
        assert len(calls) == 1
        assert list(calls[0]["actual_seq_qlen"]) == [3, 7]
    monkeypatch.delenv("HAL_ATTN_EMPTY_SEQUENCES")
    query, key, value = (tensor[0] for tensor in dense(1, 7, dtype=torch.float16))
    other = varlen_attention(query, key, value, sequences=PackedSequences.from_lengths([3, 0, 4]).without_empty())
    assert torch.equal(compact, other)


@pytest.mark.parametrize(
    "lengths", [([3, 0, 4], None), ([3, 2, 4], [3, 0, 6]), ([3, 0, 4], [3, 5, 4]), ([0, 2], [3, 0])]
)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_compact_is_exact(simulate, calls, monkeypatch, generation, lengths):
    simulate(generation)
    monkeypatch.setenv("HAL_ATTN_EMPTY_SEQUENCES", "compact")
    query, key, value, sequences = packed(*lengths, dtype=torch.float16, seed=3)
    for options in ({}, {"causal": True}):
        assert_right(query, key, value, sequences=sequences, **options)
    calls.clear()
    varlen_attention(query, key, value, sequences=sequences)
    assert len(calls) <= 1 or generation == "Ascend310P3"
