"""The ring hook on Ascend: chunks of keys, merged, are the whole."""

import pytest
import torch

from hal_attn import PackedSequences, merge_attention_states
from tests.support import assert_close_to_oracle, expected, packed


@pytest.mark.parametrize("empty_lse", ["inf", "-inf", "nan", "0"])
@pytest.mark.parametrize("generation", ["Ascend910B1", "Ascend950DT"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_merged_chunks_are_the_whole(simulate, generation, empty_lse, dtype):
    backend = simulate(generation, empty_lse=empty_lse).backends()[0]
    query, key, value, _ = packed([8], heads=4, kv_heads=2, dtype=dtype, seed=1)
    right = expected(query, key, value, sequences=PackedSequences.from_lengths([8]), causal=True)
    # The last queries see all of the first chunk; the first queries see nothing of the second.
    parts = [
        backend.forward_ring_kv_chunk(query[4:], key[:4], value[:4]),
        backend.forward_ring_kv_chunk(query[4:], key[4:], value[4:], causal=True),
    ]
    output, lse = merge_attention_states(*zip(*parts, strict=True))
    assert_close_to_oracle(output, right.output[4:], right.plain_output[4:], "output")
    assert_close_to_oracle(lse, right.lse[:, 4:], right.plain_lse[:, 4:], "LSE")


@pytest.mark.parametrize("empty_lse", ["inf", "-inf", "nan", "0"])
def test_a_chunk_of_which_some_queries_see_nothing(simulate, empty_lse):
    backend = simulate(empty_lse=empty_lse).backends()[0]
    query, key, value, sequences = packed([6, 4], [2, 4], dtype=torch.float16, seed=2)
    right = expected(query, key, value, sequences=sequences, causal=True)
    output, lse = backend.forward_ring_kv_chunk(query, key, value, sequences=sequences, causal=True)
    assert_close_to_oracle(output, right.output, right.plain_output, "output")
    assert_close_to_oracle(lse, right.lse, right.plain_lse, "LSE")
