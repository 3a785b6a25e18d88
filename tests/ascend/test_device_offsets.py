"""Packed offsets that only the device knows: read once a batch, and held to the rules of those that the host knows."""

import itertools

import pytest
import torch

from hal_attn import InvalidAttentionInputError, PackedSequences, packing, varlen_attention
from tests.support import packed, plain_varlen_attention

GENERATIONS = ("Ascend910B1", "Ascend910_9391", "Ascend950DT", "Ascend310P3")
HALF = {"dtype": torch.float16}
EMPTY = {
    "both": ([3, 0, 4], None, "sequence 1 with 0 queries and 0 keys"),
    "keys": ([3, 2, 4], [3, 0, 6], "sequence 1 with 2 queries and 0 keys"),
    "queries": ([0, 2], [3, 2], "sequence 0 with 0 queries and 3 keys"),
    "all": ([0, 2], [3, 0], "sequence 0 with 0 queries and 3 keys (and 1 more)"),
}


def on_device(lengths, lengths_k=None, longest=9, longest_k=9):
    queries, keys = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in (lengths, lengths_k or lengths)
    )
    return PackedSequences.from_device_offsets(queries, queries if lengths_k is None else keys, longest, longest_k)


@pytest.mark.parametrize("longest", [1, 2, 4, 200])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_maximum_above_the_longest_query_keeps_the_window(simulate, longest, by_hand):
    """The inference operator ignores the band of single queries."""
    backend = simulate().backends()[0]
    *rows, right = packed([1, 1], [50, 70], heads=2, head_dim=128, dtype=torch.bfloat16, seed=1)
    bound = on_device([1, 1], [50, 70], longest, 70)
    if by_hand:
        offsets = {"cu_seqlens": bound.cu_seqlens, "cu_seqlens_k": bound.cu_seqlens_k}
        lengths = {"max_seqlen": longest, "max_seqlen_k": 70}
        found = backend.forward_varlen(*rows, **offsets, **lengths, window_size=(3, 0))
    else:
        found = varlen_attention(*rows, sequences=bound, window_size=(3, 0), backend="ascend_fa")
    want, _ = plain_varlen_attention(*rows, right, window_size=(3, 0))
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


def test_a_maximum_above_one_row_does_not_meet_a_limit_that_was_not_asked(simulate, calls):
    """The selection counts on the inference operator's 4096 sequences, not on the 1024 of the training operator."""
    simulate()
    *rows, _ = packed([1] * 1025, heads=1, head_dim=64, seed=2, **HALF)
    found = varlen_attention(*rows, sequences=on_device([1] * 1025, None, 2, 2), causal=True, backend="ascend_fa")
    assert torch.equal(found, rows[2])
    assert len(calls) == 1


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_empty_sequences_are_rejected_by_default(simulate, calls, monkeypatch, generation, case):
    simulate(generation)
    lengths, lengths_k, words = EMPTY[case]
    *rows, _ = packed(lengths, lengths_k, **HALF)
    for policy, rule in (("platform", "the platform ascend"), ("reject", "HAL_ATTN_EMPTY_SEQUENCES=reject")):
        monkeypatch.setenv("HAL_ATTN_EMPTY_SEQUENCES", policy)
        for _ in range(2):
            with pytest.raises(InvalidAttentionInputError) as caught:
                varlen_attention(*rows, sequences=on_device(lengths, lengths_k))
            for part in (words, rule, "HAL_ATTN_EMPTY_SEQUENCES=compact", "PackedSequences.without_empty()"):
                assert part in str(caught.value)
    assert not calls


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_compact_answers_in_one_call(simulate, calls, monkeypatch, generation, case):
    simulate(generation)
    monkeypatch.setenv("HAL_ATTN_EMPTY_SEQUENCES", "compact")
    lengths, lengths_k, _ = EMPTY[case]
    *rows, right = packed(lengths, lengths_k, seed=3, **HALF)
    for options in ({}, {"causal": True}):
        calls.clear()
        found = varlen_attention(*rows, sequences=on_device(lengths, lengths_k), **options)
        want, _ = plain_varlen_attention(*rows, right, **options)
        torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-3)
        assert len(calls) == (case != "all") or generation == "Ascend310P3"  # which has no packed operator


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_call_bound_for_full_sequences_still_rejects(simulate, generation):
    """They have one signature: it cannot know which sequences are empty."""
    simulate(generation)
    *rows, _ = packed([3, 2, 2], **HALF)
    full, empty = on_device([3, 2, 2]), on_device([3, 0, 4])
    assert full.signature == empty.signature
    for _ in range(2):
        varlen_attention(*rows, sequences=full)
        with pytest.raises(InvalidAttentionInputError, match="sequence 1 with 0 queries"):
            varlen_attention(*rows, sequences=empty)


@pytest.mark.parametrize("policy", ["platform", "compact"])
def test_layers_share_one_reading(simulate, monkeypatch, policy):
    simulate()
    monkeypatch.setenv("HAL_ATTN_EMPTY_SEQUENCES", policy)
    read = []
    original = packing.host_offsets
    monkeypatch.setattr(packing, "host_offsets", lambda name, tensor: read.append(name) or original(name, tensor))
    lengths = [3, 0, 4] if policy == "compact" else [3, 1, 3]
    *rows, _ = packed(lengths, **HALF)
    bound = on_device(lengths)
    for options in ({}, {"causal": True}, {"causal": True}):
        varlen_attention(*rows, sequences=bound, **options)
    assert read == ["cu_seqlens"]


def test_measuring_answers_compact_too(simulate, monkeypatch, tmp_path, caplog):
    simulate()
    for name, value in {"EMPTY_SEQUENCES": "compact", "AUTOTUNE": "on", "CACHE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"HAL_ATTN_{name}", value)
    *rows, right = packed([3, 0, 4], seed=4, **HALF)
    found = varlen_attention(*rows, sequences=on_device([3, 0, 4]))
    torch.testing.assert_close(found, plain_varlen_attention(*rows, right)[0], rtol=2e-3, atol=2e-3)
    assert "failed while it was measured" not in caplog.text


@pytest.mark.parametrize(
    ("argument", "got", "sequences"),
    [
        ("max_seqlen", "3", lambda: on_device([3, 4], None, 3, 9)),
        ("max_seqlen_k", "3", lambda: on_device([3, 4], [3, 4], 9, 3)),
        ("cu_seqlens", "offsets that end at 6", lambda: on_device([3, 3])),
        ("cu_seqlens_k", "offsets that end at 8", lambda: on_device([3, 4], [4, 4])),
        ("cu_seqlens", "9 then 7", lambda: on_device([9, -2])),
    ],
)
def test_wrong_offsets_are_named_once_they_are_read(simulate, argument, got, sequences):
    simulate()
    *rows, right = packed([3, 4], **HALF)
    varlen_attention(*rows, sequences=on_device([3, 4]))
    with pytest.raises(InvalidAttentionInputError, match=f"{argument}: got .*{got}"):
        varlen_attention(*rows, sequences=sequences())
    varlen_attention(*rows, sequences=right)
