"""The default order against what was measured on an H200: whatever is installed, near the best of it."""

import itertools

import pytest
from hal_attn_cuda.order import TABLE, default_order, row_for

from hal_attn import explain
from tests.cuda.calls import batched
from tests.measured import H200, SHAPES, request_of

WITHIN = 0.90
LIBRARIES = {"flash_attn_3", "flash_attn_4"}


@pytest.mark.parametrize("key", H200)
def test_first_of_any_installed_is_near_the_best(key):
    """What comes with PyTorch is always there."""
    rate = H200[key]
    order = default_order(request_of(key), "sm90")
    for count in range(len(LIBRARIES) + 1):
        for libraries in itertools.combinations(LIBRARIES, count):
            installed = [name for name in rate if name not in LIBRARIES or name in libraries]
            chosen = next(name for name in order if name in installed)
            assert rate[chosen] >= WITHIN * max(rate[name] for name in installed), (chosen, installed)


def test_every_shape_that_counts_was_measured():
    assert {key.removesuffix(" forward") for key in H200} >= SHAPES


@pytest.mark.parametrize("key", H200)
def test_measured_shapes_get_a_measured_row(key):
    what = "forward and backward" if key.endswith(" forward+backward") else "forward, bfloat16"
    assert row_for(request_of(key), "sm90").source.startswith(f"measured on an H200, {what}")


@pytest.mark.parametrize("generation", ["sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm110", "sm120", ""])
@pytest.mark.parametrize("key", H200)
def test_what_always_works_comes_last(generation, key):
    order = default_order(request_of(key), generation)
    assert order[-2:] == ("torch_efficient", "torch_math")
    assert "torch_flash" in order
    assert len(set(order)) == len(order)


def test_every_row_says_where_it_comes_from():
    for row in TABLE:
        assert row.source.startswith(("measured on", "not measured")), row
        assert not row.source.startswith("measured") or row.generations == (9,), row


@pytest.mark.parametrize(
    ("generation", "first"),
    [("sm80", "flash_attn"), ("sm89", "flash_attn"), ("sm90", "flash_attn_3"), ("sm100", "flash_attn_4")],
)
def test_first_by_generation(simulate, generation, first):
    simulate(generation)
    tensors, _ = batched(7, 11)
    found = explain(*tensors)
    assert found.chosen.name == first
    assert found.order_source == row_for(found.request, generation).source
    assert found.order_source in str(found)
