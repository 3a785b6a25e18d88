"""The default order against what was measured on an H200: whatever is installed, near the best of it."""

import itertools

import pytest
import torch
from hal_attn_cuda.order import default_order

from hal_attn import AttentionRequest, explain
from tests.cuda.calls import batched

NAMES = ("torch_flash", "torch_cudnn", "flash_attn_3", "flash_attn_4")
SKEWED = (16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 32)
# H200, bfloat16, forward, PyTorch 2.11, TFLOP/s by the names above: lengths, heads, key heads, head dim, causal.
MEASURED = [
    ("batched", (1024,) * 16, 16, 16, 128, True, (246, 426, 315, 410)),
    ("batched", (4096,) * 4, 16, 16, 128, True, (308, 569, 628, 572)),
    ("batched", (16384,), 16, 16, 128, True, (312, 588, 675, 641)),
    ("batched", (16384,), 16, 16, 128, False, (350, 636, 697, 718)),
    ("batched", (4096,) * 4, 32, 8, 128, True, (309, 546, 655, 601)),
    ("batched", (4096,) * 4, 32, 32, 64, False, (296, 477, 504, 521)),
    ("batched", (8192,) * 2, 16, 16, 64, True, (269, 435, 522, 515)),
    ("packed", SKEWED, 16, 16, 128, False, (355, None, 687, 686)),
    ("packed", SKEWED, 32, 8, 128, True, (349, None, 634, 635)),
    ("packed", (1500,) * 20, 16, 16, 64, False, (262, None, 444, 442)),
]
WITHIN = 0.90


def request_of(kind, lengths, heads, kv_heads, dim, causal):
    return AttentionRequest(
        packed=kind == "packed",
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        batch=len(lengths),
        seqlen_q=max(lengths),
        seqlen_k=max(lengths),
        tokens_q=sum(lengths),
        tokens_k=sum(lengths),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        value_head_dim=dim,
        uniform=len(set(lengths)) == 1,
        causal=causal,
    )


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[0]}-{max(row[1])}-{row[3]}-{row[4]}-{row[5]}")
def test_first_of_any_installed_is_near_the_best(row):
    *shape, rates = row
    rate = {name: figure for name, figure in zip(NAMES, rates, strict=True) if figure is not None}
    order = default_order(request_of(*shape), "sm90")
    for count in range(1, len(rate) + 1):
        for installed in itertools.combinations(rate, count):
            chosen = next(name for name in order if name in installed)
            assert rate[chosen] >= WITHIN * max(rate[name] for name in installed), (chosen, installed)


@pytest.mark.parametrize("generation", ["sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm110", "sm120", ""])
@pytest.mark.parametrize("kind", ["batched", "packed"])
def test_what_always_works_comes_last(generation, kind):
    order = default_order(request_of(kind, (512, 64), 8, 8, 64, False), generation)
    assert order[-2:] == ("torch_efficient", "torch_math")
    assert "torch_flash" in order
    assert len(set(order)) == len(order)


@pytest.mark.parametrize(
    ("generation", "first"),
    [("sm80", "flash_attn"), ("sm89", "flash_attn"), ("sm90", "flash_attn_3"), ("sm100", "flash_attn_4")],
)
def test_first_by_generation(simulate, generation, first):
    simulate(generation)
    tensors, _ = batched(7, 11)
    assert explain(*tensors).chosen.name == first
