"""Right answers on every simulated generation and release, against the float64 oracle."""

import math

import pytest
import torch

from hal_attn import attention, varlen_attention
from tests.support import assert_right, dense, packed, randn

GENERATIONS = ("Ascend910B1", "Ascend910_9391", "Ascend950DT", "Ascend310P3")
FUSED = GENERATIONS[:3]
EMPTY_LSE = ("inf", "-inf", "nan", "0")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

BANDS = (
    {},
    {"causal": True},
    {"causal": True, "window_size": (2, 0)},
    {"window_size": (2, 1)},
    {"window_size": (-1, 1)},
    {"window_size": (2, -1)},
)
SHAPES = {
    "square": {},
    "more keys": {"seqlen_q": 3, "seqlen_k": 8},
    "more queries": {"seqlen_q": 8, "seqlen_k": 3},
    "one query": {"seqlen_q": 1, "seqlen_k": 9},
    "one key": {"seqlen_q": 4, "seqlen_k": 1},
    "grouped": {"heads": 6, "kv_heads": 2},
    "odd head dim": {"head_dim": 13},
    "smaller value": {"head_dim": 24, "value_head_dim": 7},
    "larger value": {"head_dim": 8, "value_head_dim": 33},
}
LENGTHS = {
    "equal": ([3, 1, 6], None),
    "more keys": ([3, 1, 2], [5, 4, 2]),
    "more queries": ([3, 5, 2], [5, 1, 2]),
    "ones": ([1, 1, 1], [3, 5, 1]),
}
HEAD_DIMS = {"any": (16, 16), "64": (64, 64), "128": (128, 128), "192": (192, 128)}


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batched(simulate, shape, options):
    simulate()
    for dtype in DTYPES:
        assert "ascend_fa" in assert_right(*dense(dtype=dtype, seed=1, **shape), **options)


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dims", HEAD_DIMS.values(), ids=HEAD_DIMS)
def test_packed(simulate, dims, lengths, options):
    simulate()
    for dtype in DTYPES if dims == HEAD_DIMS["any"] else DTYPES[:2]:
        shape = {"heads": 4, "kv_heads": 2, "head_dim": dims[0], "value_head_dim": dims[1]}
        query, key, value, sequences = packed(*lengths, dtype=dtype, seed=2, **shape)
        assert "ascend_fa" in assert_right(query, key, value, sequences=sequences, **options)


@pytest.mark.parametrize("empty_lse", EMPTY_LSE)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_queries_without_keys(simulate, generation, empty_lse):
    """Whatever an operator writes for them: output 0, LSE -inf or the sink, gradient 0."""
    simulate(generation, empty_lse=empty_lse)
    query, key, value = dense(2, 6, 3, dtype=torch.float16, seed=3)
    sinks = randn(4, seed=4)
    assert_right(query, key, value, causal=True)
    assert_right(query, key, value, causal=True, window_size=(1, 0))
    assert_right(query, key, value, causal=True, sinks=sinks)
    padding = torch.tensor([[False, True, True], [False, False, False]])
    assert_right(query, key, value, causal=True, key_padding_mask=padding)
    assert_right(query, key, value, key_padding_mask=padding, sinks=sinks)
    packed_inputs = packed([6, 2], [3, 2], dtype=torch.float16, seed=5)
    assert_right(*packed_inputs[:3], sequences=packed_inputs[3], causal=True)
    assert_right(*packed_inputs[:3], sequences=packed_inputs[3], causal=True, sinks=sinks)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_generations(simulate, generation, release):
    simulate(generation, torch_npu=release)
    fused = "ascend_pfa" if generation == "Ascend310P3" else "ascend_fa"
    for shape in ({}, {"seqlen_q": 1, "seqlen_k": 6}, {"seqlen_q": 5, "seqlen_k": 9, "kv_heads": 1}):
        for options in ({}, {"causal": True}, {"window_size": (2, 1)}, {"scale": 0.0}, {"scale": -0.5}):
            inputs = dense(dtype=torch.float16, seed=6, **shape)
            takers = assert_right(*inputs, **options)
            with torch.no_grad():
                assert fused in takers
    query, key, value, sequences = packed([3, 5], [4, 5], head_dim=64, dtype=torch.float16, seed=7)
    for options in ({}, {"causal": True}, {"causal": True, "window_size": (1, 0)}):
        assert fused in assert_right(query, key, value, sequences=sequences, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (2, 1, 5, 7), (1, 4, 5, 7), (1, 1, 5, 7), (2, 4, 1, 7), (1, 1, 1, 7)])
def test_masks(simulate, shape, dtype):
    simulate()
    query, key, value = dense(2, 5, 7, heads=4, kv_heads=2, dtype=dtype, seed=8)
    mask = randn(*shape, seed=9)
    hides = mask > 0.3
    padding = torch.tensor([[True] * 7, [True, False, True, True, False, False, False]])
    for options in ({}, {"causal": True}, {"window_size": (3, 1)}, {"key_padding_mask": padding}):
        assert "ascend_fa" in assert_right(query, key, value, mask=~hides, **options)
        added = mask.to(dtype).masked_fill(hides, -math.inf)
        assert "ascend_fa" in assert_right(query, key, value, mask=added, **options)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_padding_masks_and_one_query(simulate, generation):
    simulate(generation)
    padding = torch.tensor([[True, True, False, False], [False, True, True, True]])
    for seqlen_q in (1, 3):
        inputs = dense(2, seqlen_q, 4, dtype=torch.float16, seed=10)
        for options in ({}, {"causal": True}, {"mask": torch.tensor([True, False, True, True])[None, None, None]}):
            assert_right(*inputs, key_padding_mask=padding, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks(simulate, release, sink_dtype, dtype):
    simulate(torch_npu=release)
    sinks = randn(4, seed=11, dtype=sink_dtype)
    for options in ({}, {"causal": True}, {"causal": True, "window_size": (2, 0)}):
        assert "ascend_fa" in assert_right(*dense(2, 4, 6, kv_heads=2, dtype=dtype, seed=12), sinks=sinks, **options)
        dim = 16 if dtype == torch.float32 else 64
        inputs = packed([3, 4], [3, 6], head_dim=dim, dtype=dtype, seed=21)
        assert "ascend_fa" in assert_right(*inputs[:3], sequences=inputs[3], sinks=sinks, **options)


def test_the_gradient_of_sinks(simulate):
    simulate()
    inputs = dense(1, 5, 7, seed=14)
    found = {}
    for backend in ("ascend_fa", "ascend_math"):
        sinks = randn(4, seed=15).requires_grad_()
        output = attention(*inputs, sinks=sinks, causal=True, backend=backend)
        (found[backend],) = torch.autograd.grad(output.sin().sum(), [sinks])
    torch.testing.assert_close(found["ascend_fa"], found["ascend_math"])


def test_dropout_drops_and_its_gradient_is_of_what_it_kept(simulate):
    simulate()
    query, key = torch.zeros(1, 64, 2, 16), torch.zeros(1, 200, 2, 16)
    value = torch.eye(200)[None, :, None].expand(1, 200, 2, 200).contiguous().requires_grad_()
    query, key = (torch.nn.functional.pad(tensor, (0, 184)) for tensor in (query, key))
    torch.manual_seed(0)
    output = attention(query, key, value, dropout_p=0.25, backend="ascend_fa")
    weights = output.detach() * 200
    kept = weights > 0
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 0.75))
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
    (gradient,) = torch.autograd.grad(output.sum(), [value])
    torch.testing.assert_close(gradient[0, :, :, 0], output.detach()[0].sum(0).transpose(0, 1))


def test_options_that_the_fused_kernel_refuses_still_run(simulate):
    simulate()
    inputs = dense(2, 5, 7, dtype=torch.float16, seed=16)
    assert assert_right(*inputs, softcap=2.0) == ("ascend_math",)
    assert assert_right(*inputs, alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0])) == ("ascend_math",)
    assert "ascend_fa" not in assert_right(*inputs, mask=randn(1, 1, 5, 7, seed=17))


def test_offsets_that_only_the_device_knows(simulate):
    """The hook called by hand, with nothing but device offsets."""
    platform = simulate()
    query, key, value, sequences = packed([3, 5], [4, 5], dtype=torch.float16, seed=18)
    right = varlen_attention(query, key, value, sequences=sequences, causal=True, backend="ascend_fa")
    found = platform.backends()[0].forward_varlen(
        query,
        key,
        value,
        cu_seqlens=sequences.cu_seqlens,
        max_seqlen=5,
        cu_seqlens_k=sequences.cu_seqlens_k,
        max_seqlen_k=5,
        causal=True,
    )
    torch.testing.assert_close(found, right)
