"""Metadata and ring chunks of AMD's backends."""

import pytest
import torch
from hal_attn_rocm.aiter import AiterMetadata

from hal_attn import PackedSequences, UnsupportedAttentionError, merge_attention_states, varlen_attention
from hal_attn.validation import packed_request
from tests.support import assert_close_to_oracle, expected, packed


def backend_of(platform, name):
    return next(backend for backend in platform.backends() if backend.name == name)


def test_aiter_prepares_its_arguments_once_for_each_batch(simulate):
    backend = backend_of(simulate("gfx942"), "aiter")
    query, key, value, sequences = packed([5, 3], [4, 6], dtype=torch.float16)
    request = packed_request(query, key, value, sequences, {"causal": True})
    metadata = backend.metadata_builder().build(sequences, request)
    assert isinstance(metadata, AiterMetadata)
    assert metadata.arguments["cu_seqlens_q"].tolist() == [0, 5, 8]
    assert metadata.arguments["cu_seqlens_k"].tolist() == [0, 4, 10]
    assert metadata.arguments["cu_seqlens_q"].dtype == torch.int32
    lengths = {name: metadata.arguments[name] for name in ("max_seqlen_q", "max_seqlen_k", "min_seqlen_q")}
    assert lengths == {"max_seqlen_q": 5, "max_seqlen_k": 6, "min_seqlen_q": 0}
    assert metadata.blind.tolist() == [True] + [False] * 7


def test_layers_share_the_metadata_of_a_batch(simulate, monkeypatch):
    backend = backend_of(simulate("gfx942"), "aiter")
    builder = type(backend.metadata_builder())
    built = []
    build = builder.build
    monkeypatch.setattr(builder, "build", lambda *arguments: built.append(1) or build(*arguments))
    query, key, value, sequences = packed([5, 3], dtype=torch.float16)
    for _ in range(3):
        varlen_attention(query, key, value, sequences=sequences, causal=True, backend="aiter")
    assert len(built) == 1


@pytest.mark.parametrize("empty_lse", ["", ",empty_lse=nan", ",empty_lse=0"])
@pytest.mark.parametrize("name", ["aiter", "aiter_triton", "flash_attn", "torch_flash"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"softcap": 1.2}], ids=str)
def test_ring_chunks_merge_to_the_whole(simulate, name, empty_lse, options):
    """The keys of each sequence in three chunks, one of them empty for a sequence."""
    backend = backend_of(simulate(f"gfx942{empty_lse}"), name)
    if "softcap" in options and name != "aiter":
        with pytest.raises(UnsupportedAttentionError, match="softcap"):
            backend.forward_ring_kv_chunk(*packed([2], dtype=torch.float16)[:3], **options)
        return
    lengths, keys = [5, 3], [(3, 4, 2), (2, 0, 5)]
    query, key, value, whole = packed(lengths, [9, 7], kv_heads=2, dtype=torch.float16)
    key_rows, value_rows = (list(tensor.split([9, 7])) for tensor in (key, value))
    outputs, lses = [], []
    for index in range(3):
        starts = [sum(counts[:index]) for counts in keys]
        rows = [slice(start, start + counts[index]) for start, counts in zip(starts, keys, strict=True)]
        chunk = [
            torch.cat([part[row] for part, row in zip(parts, rows, strict=True)]) for parts in (key_rows, value_rows)
        ]
        sequences = PackedSequences.from_lengths(lengths, [counts[index] for counts in keys])
        output, lse = backend.forward_ring_kv_chunk(query, *chunk, sequences=sequences, **options)
        outputs.append(output)
        lses.append(lse)
    output, lse = merge_attention_states(outputs, lses)
    right = expected(query, key, value, sequences=whole, **options)
    assert_close_to_oracle(lse, right.lse, right.plain_lse, "LSE")
    assert_close_to_oracle(output.half(), right.output, right.plain_output)


@pytest.mark.parametrize("name", ["aiter", "aiter_triton", "flash_attn"])
def test_a_causal_ring_chunk(simulate, name):
    """One sequence, more queries than keys: the first see none of this chunk."""
    backend = backend_of(simulate("gfx942"), name)
    query, key, value, sequences = packed([6], [4], dtype=torch.bfloat16)
    output, lse = backend.forward_ring_kv_chunk(query, key, value, causal=True)
    right = expected(query, key, value, sequences=sequences, causal=True)
    assert_close_to_oracle(output, right.output, right.plain_output)
    assert_close_to_oracle(lse, right.lse, right.plain_lse, "LSE")
