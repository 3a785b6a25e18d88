"""What libraries take at its word: windows, slopes, places in memory; and the ring hook under autocast."""

import pytest
import torch
from hal_attn_cuda.simulated.cudnn import simulated_cudnn
from hal_attn_cuda.simulated.flash_attn_3 import simulated_flash_attn_3
from hal_attn_cuda.simulated.flash_attn_4 import simulated_flash_attn_4

from hal_attn import attention, reference_attention, reference_varlen_attention, varlen_attention
from hal_attn.registry import default_registry
from hal_attn.simulation.aten import simulated_aten
from hal_attn.simulation.flash_attn import simulated_flash_attn
from tests.cuda.calls import HALF, SLOPES, batched, bias, sequences
from tests.support import assert_right, backends_that_take, packed, randn

LOADING = ("flash_attn_3", "flash_attn_4", "flash_attn", "torch_flash", "torch_efficient", "torch_cudnn")


def backend_named(name):
    platform = default_registry().simulation("cuda:sm90,fa3=full")
    return next(backend for backend in platform.backends() if backend.name == name)


def shifted(tensor, offset):
    """The same values, beginning `offset` elements into their memory."""
    memory = tensor.new_zeros(tensor.numel() + offset)
    view = memory[offset:].view(tensor.shape)
    return view.copy_(tensor)


@pytest.mark.parametrize(
    ("lengths", "lengths_k"), [([50], [30]), ([50, 7, 12], [30, 40, 12]), ([50, 3], [30, 0]), ([9, 4], [3, 8])]
)
@pytest.mark.parametrize("window", [(20, -1), (0, -1), (2, -1), (-1, 35)])
def test_packed_window_with_one_edge(simulate, lengths, lengths_k, window):
    simulate("sm90")
    tensors, options = sequences(lengths, lengths_k, window_size=window)
    assert {"flash_attn", "torch_flash"} <= set(assert_right(*tensors, **options))


@pytest.mark.parametrize("packing", [False, True])
def test_slopes_in_half_precision_reach_flash_attention_in_float32(simulate, packing):
    simulate()
    slopes = SLOPES.to(HALF)
    tensors, options = sequences([3, 9, 4], [5, 3, 8]) if packing else batched(7, 11)
    function, reference = (
        (varlen_attention, reference_varlen_attention) if packing else (attention, reference_attention)
    )
    output = function(*tensors, alibi_slopes=slopes, backend="flash_attn", **options)
    right, _ = reference(*tensors, *options.values(), alibi_slopes=slopes)
    torch.testing.assert_close(output.double(), right, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("offset", [1, 4, 8])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("backend", LOADING)
def test_views_that_begin_anywhere(simulate, backend, which, offset):
    """Only the strides would suit: 8 elements are 16 bytes, 1 and 4 are not."""
    simulate("sm90,fa3=full")
    tensors, _ = batched(11, 11)
    tensors = [shifted(tensor, offset) if place == which else tensor for place, tensor in enumerate(tensors)]
    output = attention(*tensors, causal=True, backend=backend)
    right, _ = reference_attention(*tensors, causal=True)
    torch.testing.assert_close(output.double(), right, rtol=0.02, atol=0.02)


def efficient(query, key, value):
    return simulated_aten()._efficient_attention_forward(query, key, value, *[None] * 5, 0.0, 0)


def aten_flash(query, key, value):
    return simulated_aten()._flash_attention_forward(query, key, value, None, None, 11, 11, 0.0, False, False)


def cudnn(query, key, value, added=None):
    rows = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return simulated_cudnn("sm90")._scaled_dot_product_cudnn_attention(*rows, added, False)


SIMULATED = {
    "flash_attn_3": lambda *rows: simulated_flash_attn_3("full", "sm90").module.flash_attn_func(*rows),
    "flash_attn_4": lambda *rows: simulated_flash_attn_4("sm90").flash_attn_func(*rows),
    "flash_attn": lambda *rows: simulated_flash_attn().flash_attn_func(*rows),
    "torch_flash": aten_flash,
    "torch_efficient": efficient,
    "torch_cudnn": cudnn,
}


@pytest.mark.parametrize("backend", LOADING)
def test_simulated_kernels_load_16_bytes_at_a_time(backend):
    (query, key, value), _ = batched(11, 11)
    SIMULATED[backend](query, key, value)
    SIMULATED[backend](query, key, shifted(value, 8))
    apart = randn(2, 11, 4, 20, seed=1, dtype=HALF)[..., :16]
    for rows in ((shifted(query, 1), key, value), (query, shifted(key, 4), value), (query, key, apart)):
        with pytest.raises((RuntimeError, AssertionError), match="align"):
            SIMULATED[backend](*rows)


def test_cudnn_reads_its_bias_in_whole_rows(simulate):
    (query, key, value), _ = batched(7, 11)
    with pytest.raises(RuntimeError, match="align"):
        cudnn(query, key, value, bias())
    simulate()
    assert "torch_cudnn" in assert_right(query, key, value, mask=bias())
    wide = shifted(randn(2, 4, 7, 16, seed=5, dtype=HALF), 1)
    (query, key, value), _ = batched(7, 16)
    assert "torch_cudnn" in assert_right(query, key, value, mask=wide)
    (query, key, value), _ = batched(7, 1)
    assert "torch_cudnn" in assert_right(query, key, value, mask=bias()[..., :1])


@pytest.mark.parametrize("wide", ["key", "value"])
def test_flashinfer_counts_value_by_its_own_strides(simulate, wide):
    simulate()
    query, key, value, packing = packed([3, 1, 5], dtype=HALF, kv_heads=2)
    view = randn(9, 3, 2, 16, seed=8, dtype=HALF)[:, 1]
    key, value = (view, value) if wide == "key" else (key, view)
    assert key.stride(0) != value.stride(0)
    output = varlen_attention(query, key, value, sequences=packing, causal=True, backend="flashinfer_cudnn")
    right, _ = reference_varlen_attention(query, key, value, packing, causal=True)
    torch.testing.assert_close(output.double(), right, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch_efficient", torch.float32),
        ("torch_math", torch.float32),
        ("torch_math", torch.float16),
        ("flash_attn", torch.float16),
        ("flash_attn_4", torch.float16),
        ("torch_flash", torch.float16),
    ],
)
def test_ring_chunk_under_autocast_keeps_the_input_dtype(simulate, backend, dtype):
    simulate()
    query, key, value, packing = packed([3, 9, 4], dtype=dtype)
    assert backend in backends_that_take(query, key, value, sequences=packing)
    hook = backend_named(backend).forward_ring_kv_chunk
    options = {"sequences": packing, "causal": True}
    output, lse = hook(query, key, value, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, lse_under = hook(query, key, value, **options)
    assert under.dtype == dtype
    assert lse_under.dtype == torch.float32
    assert torch.equal(under, output)
    assert torch.equal(lse_under, lse)
