"""Which calls share a measurement: what counts, and that a shared one is good enough."""

import math
from dataclasses import replace

import pytest
import torch

from hal_attn.tuning.shape import rounded, shape_class
from tests.measured import H200, request_of

BATCHED = request_of("batched 4 of 4096 H32/8 D128 causal forward")
SKEWED = request_of("packed 10 of 16384 H32/8 D128 causal forward")
WITHIN = 0.98


def best(key):
    return max(H200[key], key=H200[key].get)


@pytest.mark.parametrize("key", H200)
def test_the_best_of_a_class_is_the_best_of_each_shape(key):
    """Whichever shape of a class is measured first, its best backend serves the others."""
    for other in H200:
        if shape_class(request_of(other)) == shape_class(request_of(key)):
            assert H200[key][best(other)] >= WITHIN * max(H200[key].values())


def test_the_shapes_that_count_are_classes_of_their_own():
    assert len({shape_class(request_of(key)) for key in H200}) == len(H200)


@pytest.mark.parametrize("band", ["causal"])
def test_any_length_of_a_class_may_be_measured_first(band):
    """Between two lengths that were measured, the ratio of two backends turns evenly with the logarithm."""
    short, long = (f"batched {n} of {s} H16/16 D128 {band} forward" for n, s in ((16, 1024), (4, 4096)))
    names = [name for name in H200[short] if name in H200[long]]

    def rate(name, length):
        part = math.log2(length / 1024) / 2
        return H200[short][name] ** (1 - part) * H200[long][name] ** part

    classes = {}
    for length in range(1024, 4097, 8):
        request = replace(BATCHED, seqlen_q=length, seqlen_k=length)
        classes.setdefault(shape_class(request), []).append(length)
    assert 16 < len(classes) < 40
    for lengths in classes.values():
        for measured in (lengths[0], lengths[-1]):
            first = max(names, key=lambda name, at=measured: rate(name, at))
            for used in (lengths[0], lengths[-1]):
                assert rate(first, used) >= WITHIN * max(rate(name, used) for name in names)


@pytest.mark.parametrize(
    ("value", "bits", "text"),
    [
        (0, 4, "0"),
        (15, 4, "15"),
        (17, 4, "18"),
        (1500, 4, "1536"),
        (1024, 5, "1024"),
        (1025, 5, "1088"),
        (5, 2, "6"),
        (33, 2, "48"),
        (None, 5, "?"),
    ],
)
def test_rounded_up_to_leading_bits(value, bits, text):
    assert rounded(value, bits) == text


SAME = {
    "scale": {"scale": 0.5},
    "a token less": {"seqlen_q": 4095, "seqlen_k": 4095, "tokens_q": 4 * 4095, "tokens_k": 4 * 4095},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_what_does_not_count(changes):
    assert shape_class(replace(BATCHED, **changes)) == shape_class(BATCHED)


MATTERS = {
    "length": {"seqlen_q": 3500},
    "key length": {"seqlen_k": 5000},
    "one more": {"seqlen_q": 4095, "equal_lengths": False},
    "batch": {"batch": 3},
    "heads": {"heads": 16},
    "key heads": {"kv_heads": 4},
    "head dim": {"head_dim": 64},
    "value head dim": {"value_head_dim": 64},
    "dtype": {"dtype": torch.float16},
    "causal": {"causal": False},
    "window": {"window_size": (128, 0)},
    "softcap": {"softcap": 30.0},
    "mask": {"mask": "bool", "mask_dtype": torch.bool, "mask_shape": (1, 1, 4096, 4096)},
    "padding": {"key_padding_mask": True},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": 1},
    "gradients": {"needs_grad": True},
    "gradients of an option": {"needs_option_grad": ("sinks",)},
    "lse": {"return_lse": True},
    "deterministic": {"deterministic": True},
    "packed": {"packed": True},
}


def test_what_counts_counts_by_itself():
    classes = [shape_class(BATCHED), *(shape_class(replace(BATCHED, **changes)) for changes in MATTERS.values())]
    assert len(set(classes)) == len(classes)


def test_masks_by_what_they_spread_over():
    made = {"mask": "float", "mask_dtype": torch.float32}
    shapes = [(1, 1, 64, 64), (4, 1, 64, 64), (4, 32, 64, 64), (4, 1, 1, 64)]
    assert len({shape_class(replace(BATCHED, **made, mask_shape=shape)) for shape in shapes}) == 4


def test_skewed_batches_share_more():
    near = replace(SKEWED, batch=9, seqlen_q=13000, seqlen_k=13000, tokens_q=26000, tokens_k=26000)
    assert shape_class(near) == shape_class(SKEWED)
    assert shape_class(replace(SKEWED, uniform=True)) != shape_class(SKEWED)
    assert shape_class(replace(SKEWED, tokens_q=9000, tokens_k=9000)) != shape_class(SKEWED)


def test_modes_of_the_process_count():
    on_cpu = replace(BATCHED, device=torch.device("cpu"), dtype=torch.float32)
    before = shape_class(on_cpu)
    assert f"threads={torch.get_num_threads()}" in before
    torch.set_float32_matmul_precision("high")
    try:
        assert shape_class(on_cpu) != before
        assert "matmul" not in shape_class(BATCHED)
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True)
    try:
        assert shape_class(on_cpu) != before
    finally:
        torch.use_deterministic_algorithms(False)
