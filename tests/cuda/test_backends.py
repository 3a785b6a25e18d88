"""Every backend over simulated functions: right where it takes a call, and which takes which."""

import pytest
import torch

from hal_attn import attention, reference_attention
from tests.cuda.calls import CALLS, HALF, SINKS, batched
from tests.support import assert_right, randn

FA3, FA4, CUDNN, INFER, FA2 = "flash_attn_3", "flash_attn_4", "torch_cudnn", "flashinfer_cudnn", "flash_attn"
FLASH, EFFICIENT, MATH = "torch_flash", "torch_efficient", "torch_math"
EVERY = (FA3, CUDNN, FA4, FA2, FLASH, EFFICIENT, MATH)
PACKED = (FA3, INFER, CUDNN, FA4, FA2, FLASH, EFFICIENT, MATH)
MASKED = (CUDNN, EFFICIENT, MATH)
# On sm90 with a full build of FlashAttention 3, best first.
TAKERS = {
    "plain": EVERY,
    "one query": EVERY,
    "one key": EVERY,
    "float16": EVERY,
    "float32": (EFFICIENT, MATH),
    "scale": EVERY,
    "grouped heads": EVERY,
    "odd head dims": EVERY,
    "wide value": EVERY,
    "causal": EVERY,
    "causal, more keys": (FA3, FA4, FA2, FLASH, EFFICIENT, MATH),
    "causal, blind rows": (FA3, FA4, FA2, FLASH, MATH),
    "window": (FA3, FA4, FA2, FLASH, MATH),
    "causal window": (FA3, FA4, FA2, FLASH, EFFICIENT, MATH),
    "blind window": (FA3, FA4, FA2, FLASH, MATH),
    "softcap": (FA3, FA4, FA2, MATH),
    "sinks": EVERY,
    "sinks, blind rows": (FA3, FA4, FA2, FLASH, MATH),
    "alibi": (FA2, MATH),
    "mask": MASKED,
    "mask, blind rows": MASKED,
    "float mask": MASKED,
    "mask, causal window": MASKED,
    "padding": MASKED,
    "padding, float32, causal": (EFFICIENT, MATH),
    "packed": PACKED,
    "packed, alike": PACKED,
    "packed, one": PACKED,
    "packed, causal": PACKED,
    "packed, unequal": PACKED,
    "packed, blind rows": (FA3, INFER, FA4, FA2, FLASH, MATH),
    "packed, window": (FA3, FA4, FA2, FLASH, MATH),
    "packed, causal window": (FA3, INFER, FA4, FA2, FLASH, EFFICIENT, MATH),
    "packed, softcap": (FA3, FA4, FA2, MATH),
    "packed, sinks": (FA3, INFER, FA4, FA2, FLASH, MATH),
    "packed, alibi": (FA2, MATH),
    "packed, float32": (EFFICIENT, MATH),
}
BLIND = [name for name in CALLS if "blind" in name or "unequal" in name]


def test_every_call_has_its_takers():
    assert set(TAKERS) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_right_on_every_taker(simulate, name):
    simulate("sm90,fa3=full")
    tensors, options = CALLS[name]()
    assert assert_right(*tensors, **options) == TAKERS[name]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "0"])
@pytest.mark.parametrize("name", BLIND)
def test_rows_without_keys_whatever_the_kernel_writes(simulate, name, value):
    simulate(f"sm90,fa3=full,empty_lse={value}")
    tensors, options = CALLS[name]()
    assert_right(*tensors, **options)


@pytest.mark.parametrize("generation", ["sm80", "sm86", "sm89", "sm100", "sm110", "sm120"])
@pytest.mark.parametrize("name", ["plain", "causal", "sinks", "mask", "packed, causal"])
def test_right_on_every_generation(simulate, generation, name):
    simulate(generation)
    tensors, options = CALLS[name]()
    assert assert_right(*tensors, **options)[-2:] == (EFFICIENT, MATH)


@pytest.mark.parametrize("name", ["plain", "causal", "softcap", "sinks", "packed, blind rows"])
def test_older_flash_attention_3_gives_its_lse_another_way(simulate, name):
    simulate("sm90,fa3=old")
    tensors, options = CALLS[name]()
    assert FA3 in assert_right(*tensors, **options)


@pytest.mark.parametrize("backend", [FA2, FLASH, EFFICIENT, CUDNN, MATH])
def test_dropout_drops_and_scales(simulate, backend):
    simulate()
    (query, key, value), _ = batched(64, 64)
    torch.manual_seed(0)
    full, dropped = (attention(query, key, torch.ones_like(value), dropout_p=p, backend=backend) for p in (0.0, 0.5))
    assert torch.equal(full, torch.ones_like(full))
    assert dropped.float().std() > 0.05
    assert dropped.float().mean().item() == pytest.approx(1.0, abs=0.05)


def test_flash_attention_4_gives_gradients_of_lse_and_sinks(simulate):
    simulate()
    (query, key, value), _ = batched(7, 11)
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value, SINKS)]
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    output, lse = attention(*leaves[:3], sinks=leaves[3], return_lse=True, backend=FA4)
    right, right_lse = reference_attention(*exact[:3], sinks=exact[3])
    found = torch.autograd.grad(output.float().sum() + lse.sum(), leaves)
    wanted = torch.autograd.grad(right.sum() + right_lse.sum(), exact)
    for have, need in zip(found, wanted, strict=True):
        torch.testing.assert_close(have.double(), need, rtol=0.02, atol=0.02)


def test_memory_efficient_attention_gives_the_gradient_of_a_mask(simulate):
    simulate()
    (query, key, value), _ = batched(7, 11)
    bias = randn(1, 4, 7, 11, seed=5, dtype=HALF)
    leaf, exact = bias.clone().requires_grad_(), bias.double().requires_grad_()
    output = attention(query, key, value, mask=leaf, backend=EFFICIENT)
    right, _ = reference_attention(query, key, value, mask=exact)
    have, need = (torch.autograd.grad(out.sum(), mask)[0] for out, mask in ((output, leaf), (right, exact)))
    torch.testing.assert_close(have.double(), need, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", [FA3, FA4, CUDNN, FA2, FLASH, EFFICIENT])
def test_strided_inputs(simulate, backend):
    """Halves of one tensor with an odd last dimension: no stride suits a kernel."""
    simulate()
    both = randn(2, 7, 4, 33, seed=3, dtype=HALF)
    query, key = both[..., :16], both[..., 16:32]
    value = randn(2, 4, 16, 7, seed=4, dtype=HALF).permute(0, 3, 1, 2)
    output = attention(query, key, value, causal=True, backend=backend)
    right, _ = reference_attention(query, key, value, causal=True)
    torch.testing.assert_close(output.double(), right, rtol=0.02, atol=0.02)
