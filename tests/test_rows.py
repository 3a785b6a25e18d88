"""Which queries see no key: counted by lengths, on the host and on the device, against the band pair by pair."""

import itertools

import pytest
import torch

from hal_attn import PackedSequences, reference_varlen_attention
from hal_attn.registry import default_registry
from hal_attn.rows import leading_blind_rows, packed_blind_rows
from tests.support import packed, visible_pairs

LENGTHS = range(5)
CPU = torch.device("cpu")
RIGHT_EDGES = (-1, 0, 1, 3)


def blind_pair_by_pair(seqlen_q, seqlen_k, right):
    return ~visible_pairs(seqlen_q, seqlen_k, window_size=(None, right)).any(-1)


def on_the_device_only(sequences):
    """The same sequences, of which the host knows the longest lengths alone."""
    offsets = sequences.offsets(CPU)
    return PackedSequences.from_device_offsets(*offsets, sequences.max_seqlen, sequences.max_seqlen_k)


@pytest.mark.parametrize("right", RIGHT_EDGES)
def test_leading_rows_of_one_sequence(right):
    for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
        count = leading_blind_rows(seqlen_q, seqlen_k, right)
        assert (torch.arange(seqlen_q) < count).tolist() == blind_pair_by_pair(seqlen_q, seqlen_k, right).tolist()


@pytest.mark.parametrize("right", RIGHT_EDGES)
def test_rows_of_every_pair_of_sequences(right):
    """All lengths of two sequences from 0 to 4: the host's answer and the device's are those of the band."""
    for lengths in itertools.product(LENGTHS, LENGTHS):
        for lengths_k in itertools.product(LENGTHS, LENGTHS):
            sequences = PackedSequences.from_lengths(lengths, lengths_k)
            pairs = zip(lengths, lengths_k, strict=True)
            right_rows = torch.cat([blind_pair_by_pair(*pair, right) for pair in pairs]).tolist()
            tokens = sum(lengths)
            on_host = packed_blind_rows(sequences, right, tokens, CPU)
            assert (on_host is not None) == any(right_rows)
            assert on_host is None or on_host.tolist() == right_rows
            on_device = packed_blind_rows(on_the_device_only(sequences), right, tokens, CPU)
            assert on_device.dtype == torch.bool
            assert on_device.tolist() == right_rows, (lengths, lengths_k)


@pytest.mark.parametrize("backend", ["flash_attn", "flash_attn_3", "flash_attn_4", "torch_flash"])
@pytest.mark.parametrize("empty_lse", ["nan", "inf", "0"])
def test_device_offsets_give_what_host_offsets_give(backend, empty_lse):
    """Causal, with more queries than keys, no keys and no queries; the LSE of blind rows is -inf, their output 0."""
    query, key, value, sequences = packed([5, 3, 0, 4], [3, 0, 2, 6], dtype=torch.bfloat16)
    platform = default_registry().simulation(f"cuda:sm90,fa3=full,empty_lse={empty_lse}")
    hook = next(each for each in platform.backends() if each.name == backend).forward_varlen
    offsets, offsets_k = sequences.offsets(CPU)
    given = {"cu_seqlens": offsets, "max_seqlen": 5, "cu_seqlens_k": offsets_k, "max_seqlen_k": 6}
    known = {"cu_seqlens_host": sequences.cu_seqlens_host, "cu_seqlens_k_host": sequences.cu_seqlens_k_host}
    options = {"causal": True, "return_lse": True}
    output, lse = hook(query, key, value, **given, **options)
    host_output, host_lse = hook(query, key, value, **given, **known, **options)
    assert torch.equal(output, host_output)
    assert torch.equal(lse, host_lse)
    right, right_lse = reference_varlen_attention(query, key, value, sequences, causal=True)
    blind = torch.isneginf(right_lse)
    assert blind.sum(-1).tolist() == [5] * 4
    assert torch.equal(torch.isneginf(lse), blind)
    assert not output[blind[0]].any()
    torch.testing.assert_close(output.double(), right, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse[~blind].double(), right_lse[~blind].double(), rtol=0.01, atol=0.01)
