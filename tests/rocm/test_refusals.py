"""What each backend refuses on AMD devices, under the argument's name, with the reason."""

import re

import pytest
import torch

from hal_attn import explain, select_backend
from tests.support import dense, packed, randn

HALF = {"dtype": torch.float16}
MASK = torch.ones(1, 1, 5, 5, dtype=torch.bool)
SLOPES = torch.ones(4)


@pytest.mark.parametrize(
    ("backend", "shape", "options", "rule", "reason"),
    [
        ("aiter", {"dtype": torch.float32}, {}, "dtype", "float32"),
        ("aiter", {"head_dim": 264}, {}, "head_dim", "at most 256"),
        ("aiter", {}, {"mask": MASK.expand(2, 1, 5, 5)}, "mask", r"one mask \[1, 1, Sq, Sk\]"),
        ("aiter", {}, {"mask": MASK.expand(1, 4, 5, 5)}, "mask", "4 heads"),
        ("aiter", {}, {"mask": MASK.float()}, "mask", "dtype of query"),
        ("aiter", {}, {"key_padding_mask": torch.ones(2, 5, dtype=torch.bool)}, "key_padding_mask", "varlen_attention"),
        ("aiter", {}, {"mask": MASK, "alibi_slopes": SLOPES}, "alibi_slopes", "with a mask"),
        ("aiter", {}, {"softcap": 1.0, "alibi_slopes": SLOPES}, "softcap", "alibi_slopes"),
        ("aiter", {}, {"softcap": 1.0, "mask": MASK}, "softcap", "mask"),
        ("aiter", {}, {"softcap": 1.0, "dropout_p": 0.1}, "softcap", "dropout_p"),
        ("aiter", {}, {"scale": 0.0}, "scale", "above 0"),
        ("flash_attn", {}, {"scale": -1.0}, "scale", "above 0"),
        ("flash_attn", {}, {"softcap": 1.0}, "softcap", "off"),
        ("flash_attn", {}, {"mask": MASK}, "mask", "no mask"),
        ("aiter_triton", {}, {"window_size": (2, 0)}, "window_size", "no window"),
        ("aiter_triton", {}, {"softcap": 1.0}, "softcap", "off"),
        ("aiter_triton", {}, {"mask": MASK}, "mask", "no mask"),
        ("aiter_triton", {}, {"dropout_p": 0.1}, "dropout_p", "off"),
        ("aiter_triton", {}, {"deterministic": True}, "deterministic", "off"),
        ("torch_flash", {}, {"window_size": (2, 0)}, "window_size", "no window"),
        ("torch_flash", {}, {"alibi_slopes": SLOPES}, "alibi_slopes", "off"),
        ("torch_flash", {"seqlen_k": 9}, {"causal": True}, "causal", "equal lengths"),
        ("torch_efficient", {}, {"window_size": (2, 0)}, "window_size", "no window"),
        ("torch_efficient", {"head_dim": 520}, {}, "head_dim", "at most 512"),
        ("torch_efficient", {"seqlen_k": 9}, {"causal": True}, "causal", "equal lengths"),
    ],
)
def test_batched(simulate, refusals, backend, shape, options, rule, reason):
    simulate("gfx942")
    found = refusals(backend, *dense(**(HALF | shape)), **options)
    assert rule in found
    assert re.search(reason, found[rule])


@pytest.mark.parametrize("options", [{"return_lse": True}, {"sinks": torch.zeros(4)}])
def test_the_efficient_kernel_has_no_packed_lse(simulate, refusals, options):
    simulate("gfx942")
    query, key, value, sequences = packed([5, 3], **HALF)
    assert refusals("torch_efficient", query, key, value, sequences=sequences, **options).keys() == options.keys()
    assert not refusals("torch_efficient", *dense(**HALF), **options)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"window_size": (2, 0)}, "window_size"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"deterministic": True}, "deterministic"),
    ],
)
def test_flash_attn_over_triton_claims_less(simulate, refusals, options, rule):
    simulate("gfx942")
    assert not refusals("flash_attn", *dense(**HALF), **options)
    simulate("gfx942,flash_attn=triton")
    assert "FLASH_ATTENTION_TRITON_AMD_ENABLE" in refusals("flash_attn", *dense(**HALF), **options)[rule]


@pytest.mark.parametrize(
    ("generation", "refused"),
    [
        ("gfx942", set()),
        ("gfx950", set()),
        ("gfx90a", {"aiter_triton"}),
        ("gfx1100", {"aiter", "aiter_triton"}),
        ("gfx1100,flash_attn=ck", {"aiter", "aiter_triton", "flash_attn"}),
    ],
)
def test_libraries_without_kernels_for_the_generation(simulate, refusals, generation, refused):
    simulate(generation)
    names = [each.backend.name for each in explain(*dense(**HALF)).considered]
    reasons = {name: refusals(name, *dense(**HALF)) for name in names}
    assert {name for name, found in reasons.items() if found} == refused
    for name in refused:
        assert generation.partition(",")[0] in reasons[name]["device"]


def test_the_lse_of_an_older_pytorch_is_in_base_2(simulate, refusals, monkeypatch):
    simulate("gfx942")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.8.1+rocm6.4"))
    for backend in ("torch_flash", "torch_efficient"):
        assert "base 2" in refusals(backend, *dense(**HALF), return_lse=True)["return_lse"]
        assert not refusals(backend, *dense(**HALF))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 1.0}, {"sinks": randn(4, seed=1)}], ids=str)
def test_something_takes_every_call(simulate, options):
    for generation in ("gfx942", "gfx90a", "gfx1100"):
        simulate(generation)
        for dtype in (torch.float16, torch.float64):
            assert select_backend(*dense(head_dim=300, dtype=dtype), **options)
