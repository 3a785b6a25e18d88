"""Whether results count as the same, and who is the odd one."""

import pytest
import torch

from hal_attn.tuning import comparison
from hal_attn.tuning.comparison import difference, odd_ones, some_rows

HALF, FULL = torch.bfloat16, torch.float32


def result(seed=0, *, noise=0.0, dtype=FULL, **parts):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(99))
    output = values + noise * torch.randn(64, 8, generator=generator)
    return {"output": output.to(dtype), **parts}


def test_rounding_is_no_difference():
    assert difference(result(1, noise=2e-7), result(2, noise=2e-7), FULL) == ""
    assert difference(result(1, noise=2e-3, dtype=HALF), result(2, noise=2e-3, dtype=HALF), HALF) == ""


def test_more_than_rounding_is():
    assert "output is" in difference(result(1, noise=1e-4), result(2), FULL)
    assert "output is" in difference(result(1, noise=0.1, dtype=HALF), result(2, dtype=HALF), HALF)


def test_one_wrong_value_is():
    wrong = result()
    wrong["output"][3, 3] += 1e-2
    assert "output is" in difference(wrong, result(), FULL)


def test_another_shape_is():
    assert "of shape" in difference({"output": torch.ones(2, 3)}, {"output": torch.ones(3, 2)}, FULL)


def test_values_that_are_not_finite_must_be_in_the_same_places():
    hidden = {"LSE": torch.tensor([0.0, -torch.inf, 1.0])}
    assert difference(hidden, {"LSE": torch.tensor([0.0, -torch.inf, 1.0])}, FULL) == ""
    assert "not finite" in difference(hidden, {"LSE": torch.tensor([0.0, 5.0, 1.0])}, FULL)
    assert "not finite" in difference({"LSE": torch.tensor([0.0, torch.nan, 1.0])}, hidden, FULL)


def test_an_lse_near_zero_counts_as_one():
    assert difference({"LSE": torch.full((4,), 1e-6)}, {"LSE": torch.zeros(4)}, FULL) == ""


def test_a_gradient_of_nothing_but_rounding_is_judged_by_the_others():
    """With one key, the gradients of query and key are 0 but for rounding."""
    one = {"gradient of query": torch.full((4, 4), 1e-3), "gradient of value": torch.ones(4, 4)}
    other = {"gradient of query": torch.zeros(4, 4), "gradient of value": torch.ones(4, 4)}
    assert difference(one, other, HALF) == ""
    other["gradient of value"] = torch.zeros(4, 4)
    assert "gradient of" in difference(one, other, HALF)


def test_shortened_products_are_allowed_where_they_are():
    apart = result(1, noise=2e-4), result(2)
    assert difference(*apart, FULL)
    torch.set_float32_matmul_precision("high")
    try:
        assert not difference(*apart, FULL)
        assert difference(result(1, noise=0.2), result(2), FULL)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_most_are_right():
    wrong = {"output": result()["output"] + 1}
    found = odd_ones({"a": wrong, "b": result(1, noise=1e-7), "c": result(2, noise=1e-7)}, FULL)
    assert list(found) == ["a"]
    assert found["a"].startswith("its result differs from that of b, c: output is")


def test_where_two_differ_the_plainest_is_right():
    wrong = {"output": result()["output"] + 1}
    assert list(odd_ones({"fast": wrong, "plain": result()}, FULL)) == ["fast"]


def test_nobody_is_odd():
    assert odd_ones({}, FULL) == {}
    assert odd_ones({"a": result()}, FULL) == {}
    assert odd_ones({"a": result(), "b": result()}, FULL) == {}


@pytest.mark.parametrize("rows", [4, 1000])
def test_some_rows_are_spread_from_the_first_to_the_last(rows, monkeypatch):
    monkeypatch.setattr(comparison, "MOST_VALUES", 64)
    tensor = torch.arange(rows * 8, dtype=FULL).view(rows // 4, 4, 8)
    found = some_rows(tensor)
    assert found.numel() == min(64, rows * 8)
    assert found[0].tolist() == tensor[0, 0].tolist()
    assert found[-1].tolist() == tensor[-1, -1].tolist()
    assert found.data_ptr() != tensor.data_ptr()
