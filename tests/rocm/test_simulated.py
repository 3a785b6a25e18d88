"""The simulated functions have the vendors' signatures and defaults, and refuse what the vendors refuse."""

import math

import pytest
import torch
from hal_attn_rocm.simulated.aiter import SimulatedAiter
from hal_attn_rocm.simulated.aiter_triton import SimulatedAiterTriton
from hal_attn_rocm.simulated.aotriton import simulated_aotriton
from hal_attn_rocm.simulated.flash_attn import simulated_rocm_flash_attn

from tests.support import dense, packed
from tests.vendors.signatures import assert_same_signature

HALF = {"heads": 2, "dtype": torch.float16}
LIBRARIES = [
    ("aiter", SimulatedAiter("gfx942"), ("flash_attn_func", "flash_attn_varlen_func", "mha_varlen_fwd")),
    ("aiter.ops.triton.mha", SimulatedAiterTriton("gfx942"), ("flash_attn_func", "flash_attn_varlen_func")),
    ("flash_attn", simulated_rocm_flash_attn("ck"), ("flash_attn_func", "flash_attn_varlen_func")),
]


@pytest.mark.parametrize(
    ("library", "prefix", "name"), [(library, prefix, name) for prefix, library, names in LIBRARIES for name in names]
)
def test_signature(library, prefix, name):
    assert_same_signature(getattr(library, name), f"{prefix}.{name}")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"bias": torch.zeros(5, 4, dtype=torch.float16)}, "bias shape"),
        ({"bias": torch.zeros(5, 5)}, "misread"),
        ({"alibi_slopes": torch.zeros(2, dtype=torch.float16)}, "misread"),
        ({"bias": torch.zeros(5, 5, dtype=torch.float16), "alibi_slopes": torch.zeros(2)}, "at the same time"),
        ({"how_v3_bf16_cvt": 3}, "invalid argument"),
    ],
)
def test_aiter_refuses(options, error):
    with pytest.raises(RuntimeError, match=error):
        SimulatedAiter("gfx942").flash_attn_func(*dense(1, 5, **HALF), **options)


@pytest.mark.parametrize("shape", [{"dtype": torch.float32}, {"head_dim": 264}])
def test_aiter_limits(shape):
    with pytest.raises(RuntimeError, match="only support"):
        SimulatedAiter("gfx942").flash_attn_func(*dense(1, 5, **(HALF | shape)))


def test_ck_has_softcap_without_bias_only():
    query, key, value, sequences = packed([5], **HALF)
    offsets, _ = sequences.offsets(query.device)
    with pytest.raises(RuntimeError, match="invalid argument"):
        SimulatedAiter("gfx942").flash_attn_varlen_func(
            query, key, value, offsets, offsets, 5, 5, logits_soft_cap=1.0, alibi_slopes=torch.ones(2)
        )


@pytest.mark.parametrize("library", [SimulatedAiter("gfx942"), SimulatedAiterTriton("gfx942")])
def test_what_is_returned_follows_what_is_asked(library):
    query, key, value = dense(1, 5, **HALF)
    assert isinstance(library.flash_attn_func(query, key, value), torch.Tensor)
    assert len(library.flash_attn_func(query, key, value, return_lse=True)) == 2
    assert len(library.flash_attn_func(query, key, value, return_lse=True, return_attn_probs=True)) == 3
    assert len(library.flash_attn_func(query, key, value, return_attn_probs=True)) == 2


@pytest.mark.parametrize(
    ("library", "lse"),
    [
        (SimulatedAiter("gfx942"), -math.inf),
        (SimulatedAiter("gfx942", math.inf), math.inf),
        (SimulatedAiterTriton("gfx942"), 0.0),
    ],
)
def test_lse_of_rows_without_keys(library, lse):
    output, found = library.flash_attn_func(*dense(1, 5, 3, **HALF), causal=True, return_lse=True)
    assert not output[:, :2].any()
    assert (found[..., :2] == lse).all()


def test_aotriton_has_no_window_and_no_slopes():
    aten = simulated_aotriton("gfx942")
    query, key, value = dense(1, 5, **HALF)
    call = (query, key, value, None, None, 5, 5, 0.0, False, False)
    window = aten._flash_attention_forward(*call, window_size_left=1)[0]
    assert torch.equal(window, aten._flash_attention_forward(*call)[0])
    with pytest.raises(RuntimeError, match="alibi"):
        aten._flash_attention_forward(*call, alibi_slopes=torch.ones(2))
    with pytest.raises(RuntimeError, match="window_size"):
        aten._efficient_attention_forward(query, key, value, *[None] * 5, 0.0, 2, window_size=2)
    with pytest.raises(RuntimeError, match="only supports"):
        simulated_aotriton("gfx906")._flash_attention_forward(*call)
