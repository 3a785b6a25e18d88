"""Every backend of each simulated generation against the float64 oracle: outputs, LSEs and gradients."""

import pytest
import torch

from hal_attn import attention, reference_attention, varlen_attention
from tests.support import assert_close_to_oracle, assert_right, dense, expected, packed, randn

AITER, FLASH, TRITON = "aiter", "flash_attn", "aiter_triton"
OWN, MATH = ("torch_flash", "torch_efficient"), "torch_math"
CDNA3 = "gfx942"

BATCHED = [
    ({}, {}, {AITER, FLASH, TRITON, *OWN, MATH}),
    ({"kv_heads": 2}, {"causal": True}, {AITER, FLASH, TRITON, *OWN, MATH}),
    ({"seqlen_k": 9}, {"causal": True}, {AITER, FLASH, TRITON, MATH}),
    ({"seqlen_q": 9, "seqlen_k": 4}, {"causal": True}, {AITER, FLASH, TRITON, MATH}),
    ({"seqlen_k": 9}, {"window_size": (2, 1)}, {AITER, FLASH, MATH}),
    ({}, {"window_size": (0, 0)}, {AITER, FLASH, MATH}),
    ({"seqlen_k": 9}, {"window_size": (0, 0), "scale": 0.3}, {AITER, FLASH, MATH}),
    ({}, {"window_size": (0, -1)}, {AITER, FLASH, MATH}),
    ({"seqlen_k": 9}, {"causal": True, "window_size": (3, -1)}, {AITER, FLASH, MATH}),
    ({"seqlen_q": 9, "seqlen_k": 4}, {"window_size": (1, 2)}, {AITER, FLASH, MATH}),
    ({"head_dim": 20, "value_head_dim": 20}, {"causal": True}, {AITER, FLASH, TRITON, *OWN, MATH}),
    ({"head_dim": 24, "value_head_dim": 40}, {}, {AITER, FLASH, TRITON, *OWN, MATH}),
    ({"head_dim": 192, "value_head_dim": 128}, {"causal": True}, {AITER, FLASH, TRITON, *OWN, MATH}),
    ({"head_dim": 72}, {"window_size": (2, 1)}, {AITER, FLASH, MATH}),
    ({"head_dim": 264}, {}, {"torch_efficient", MATH}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("shape", "options", "takers"), BATCHED)
def test_batched(simulate, shape, options, takers, dtype):
    simulate(CDNA3)
    assert set(assert_right(*dense(dtype=dtype, **{"seqlen_q": 6, **shape}), **options)) == takers


@pytest.mark.parametrize("generation", ["gfx942", "gfx950", "gfx90a", "gfx1100"])
@pytest.mark.parametrize("seqlen_q", [20, 130])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (0, 0)}, {"window_size": (0, -1)}, {"window_size": (4, 2)}],
    ids=str,
)
def test_where_assembly_is_near(simulate, generation, seqlen_q, options):
    """bfloat16 with head dim 128, for which AITER has assembly, in both passes."""
    simulate(generation)
    for seqlen_k in (seqlen_q, seqlen_q + 4):
        shape = {"heads": 2, "kv_heads": 1, "head_dim": 128, "dtype": torch.bfloat16}
        takers = assert_right(*dense(1, seqlen_q, seqlen_k, **shape), **options)
        assert (AITER in takers) == (generation != "gfx1100")
        query, key, value, sequences = packed([seqlen_q, 3], [seqlen_k, 5], **shape)
        takers = assert_right(query, key, value, sequences=sequences, **options)
        assert (AITER in takers) == (generation != "gfx1100")


@pytest.mark.parametrize("generation", ["gfx942", "gfx950"])
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 192])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (3, 1)}, {"window_size": (0, 0)}], ids=str)
def test_gradients_where_assembly_has_a_backward_pass(simulate, generation, head_dim, options):
    simulate(generation)
    for lengths in ([20], [24]):
        shape = {"heads": 2, "head_dim": head_dim, "dtype": torch.float16}
        query, key, value, sequences = packed(lengths, [22], **shape)
        assert AITER in assert_right(query, key, value, sequences=sequences, **options)
        assert AITER in assert_right(*dense(1, lengths[0], 22, **shape), **options)


@pytest.mark.parametrize(
    ("options", "takers"),
    [
        ({}, {AITER, FLASH, TRITON, *OWN, MATH}),
        ({"causal": True}, {AITER, FLASH, TRITON, MATH}),
        ({"window_size": (2, 0)}, {AITER, FLASH, MATH}),
        ({"window_size": (2, 1)}, {AITER, FLASH, MATH}),
        ({"softcap": 1.5}, {AITER, MATH}),
        ({"scale": 0.4}, {AITER, FLASH, TRITON, *OWN, MATH}),
    ],
)
@pytest.mark.parametrize("host", [True, False])
def test_packed(simulate, options, takers, host):
    simulate(CDNA3)
    query, key, value, sequences = packed([5, 1, 7], [6, 3, 4], kv_heads=2, dtype=torch.bfloat16)
    if host:
        assert set(assert_right(query, key, value, sequences=sequences, **options)) == takers
        return
    right = expected(query, key, value, sequences=sequences, **options)
    offsets, offsets_k = sequences.offsets(query.device)
    for backend in takers & {AITER, FLASH, TRITON}:
        output = varlen_attention(
            query,
            key,
            value,
            cu_seqlens=offsets,
            max_seqlen=7,
            cu_seqlens_k=offsets_k,
            max_seqlen_k=6,
            backend=backend,
            **options,
        )
        assert_close_to_oracle(output, right.output, right.plain_output, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize(
    "options", [{"softcap": 1.5}, {"softcap": 0.7, "causal": True}, {"softcap": 1.5, "window_size": (3, 0)}], ids=str
)
def test_softcap(simulate, dtype, head_dim, options):
    """Batched by one packed batch of equal lengths, packed as it is; without gradients, which AITER does not have."""
    simulate(CDNA3)
    query, key, value = dense(2, 6, 8, kv_heads=2, head_dim=head_dim, dtype=dtype, spread=2.0)
    assert AITER in assert_right(query, key, value, gradients=False, **options)
    transposed = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value))
    assert AITER in assert_right(*transposed, gradients=False, **options)
    query, key, value, sequences = packed([5, 7], [6, 9], head_dim=head_dim, dtype=dtype, spread=2.0)
    assert AITER in assert_right(query, key, value, sequences=sequences, gradients=False, **options)


@pytest.mark.parametrize("packed_call", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 1.0}], ids=str)
def test_sinks(simulate, packed_call, options):
    simulate(CDNA3)
    sinks = randn(4, seed=5)
    inputs = packed([5, 7], [4, 9], dtype=torch.float16)
    query, key, value = inputs[:3] if packed_call else dense(2, 7, 5, dtype=torch.float16)
    extra = {"sequences": inputs[3]} if packed_call else {}
    assert AITER in assert_right(query, key, value, gradients=False, sinks=sinks, **extra, **options)


@pytest.mark.parametrize("flash_attn", ["ck", "triton"])
@pytest.mark.parametrize("slopes", [(4,), (2, 4)])
@pytest.mark.parametrize("packed_call", [False, True])
def test_alibi(simulate, flash_attn, slopes, packed_call):
    simulate(f"{CDNA3},flash_attn={flash_attn}")
    slopes = randn(*slopes, seed=4).abs()
    inputs = packed([5, 7], [4, 9], kv_heads=2, dtype=torch.bfloat16)
    query, key, value = inputs[:3] if packed_call else dense(2, 5, 8, kv_heads=2, dtype=torch.bfloat16)
    extra = {"sequences": inputs[3]} if packed_call else {}
    takers = assert_right(query, key, value, alibi_slopes=slopes, causal=True, **extra)
    assert set(takers) == {AITER, FLASH, TRITON, MATH}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(1, 1, 6, 8), (1, 1, 1, 8), (1, 1, 6, 1)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 2)}], ids=str)
def test_masks_that_all_batches_and_heads_share(simulate, kind, shape, options):
    simulate(CDNA3)
    mask = randn(*shape, seed=3) > -0.3 if kind == "bool" else randn(*shape, seed=3, dtype=torch.bfloat16)
    if kind == "float":
        mask = mask.masked_fill(mask > 1, -torch.inf)
    query, key, value = dense(2, 6, 8, kv_heads=2, dtype=torch.bfloat16)
    assert AITER in assert_right(query, key, value, mask=mask, **options)


def test_key_padding_of_one_batch(simulate):
    simulate(CDNA3)
    padding = torch.tensor([[True] * 5 + [False] * 3])
    assert AITER in assert_right(*dense(1, 6, 8, dtype=torch.bfloat16), key_padding_mask=padding, causal=True)


@pytest.mark.parametrize("flash_attn", ["ck", "triton"])
@pytest.mark.parametrize("empty_lse", ["", ",empty_lse=inf", ",empty_lse=-inf", ",empty_lse=nan", ",empty_lse=0"])
def test_queries_without_keys(simulate, empty_lse, flash_attn):
    """By the triangle, by a window and by a mask, whatever the library writes as their LSE."""
    simulate(f"{CDNA3},flash_attn={flash_attn}{empty_lse}")
    shape = {"kv_heads": 2, "dtype": torch.bfloat16}
    query, key, value = dense(2, 7, 4, **shape)
    assert {AITER, FLASH, TRITON} <= set(assert_right(query, key, value, causal=True))
    assert AITER in assert_right(query, key, value, window_size=(-1, 1))
    mask = torch.ones(1, 1, 7, 4, dtype=torch.bool)
    mask[:, :, 2:4] = False
    assert AITER in assert_right(query, key, value, mask=mask)
    query, key, value, sequences = packed([7, 0, 2, 3], [4, 5, 0, 3], **shape)
    assert {AITER, FLASH, TRITON} <= set(assert_right(query, key, value, sequences=sequences, causal=True))


@pytest.mark.parametrize("backend", [AITER, FLASH, "torch_flash", "torch_efficient"])
def test_dropout_keeps_the_expectation(simulate, backend):
    simulate(CDNA3)
    query, key, _ = dense(1, 64, 64, heads=8, dtype=torch.float16)
    value = torch.ones(1, 64, 8, 16, dtype=torch.float16)
    torch.manual_seed(0)
    first, second = (attention(query, key, value, dropout_p=0.4, backend=backend) for _ in range(2))
    assert not torch.equal(first, second)
    assert abs(first.mean().item() - 1) < 0.05


def test_float32_runs_on_what_takes_it(simulate):
    simulate(CDNA3)
    query, key, value = dense(dtype=torch.float32)
    assert assert_right(query, key, value) == ("torch_efficient", MATH)
    output, _ = reference_attention(query, key, value)
    assert torch.allclose(attention(query, key, value), output.float(), atol=1e-5)
