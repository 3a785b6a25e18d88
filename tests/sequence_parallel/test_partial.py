"""Gradients added up as they come: which dtype holds them, and what becomes of the parts."""

import pytest
import torch

from hal_attn.sequence_parallel.partial import GradientSum
from hal_attn.sequence_parallel.work import RowSet
from tests.support import randn

ALL, SLICE = RowSet(6), RowSet(2, 3)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def part(rows, seed, dtype=BFLOAT16):
    return randn(rows.count, 2, 4, seed=seed, dtype=dtype)


def test_one_part_for_all_rows_is_kept_as_it_is():
    first = part(ALL, 1)
    total = GradientSum(first, FLOAT32)
    total.add(ALL, first)
    assert total.total is first


def test_nothing_is_zero():
    total = GradientSum(part(ALL, 1), BFLOAT16).total
    assert (total.dtype, total.shape, total.count_nonzero()) == (BFLOAT16, (6, 2, 4), 0)


@pytest.mark.parametrize("first", [ALL, SLICE], ids=["all", "slice"])
def test_two_parts_are_rounded_once_whichever_dtype_holds_them(first):
    sums = {}
    for dtype in (BFLOAT16, FLOAT32):
        total = GradientSum(part(ALL, 1), dtype)
        total.add(first, part(first, 2))
        total.add(SLICE, part(SLICE, 3))
        sums[dtype] = total.total
    assert [total.dtype for total in sums.values()] == [BFLOAT16, FLOAT32]
    assert torch.equal(sums[BFLOAT16], sums[FLOAT32].bfloat16())


def test_more_parts_are_added_in_float32():
    parts = [part(ALL, seed) for seed in range(5)]
    total = GradientSum(parts[0], FLOAT32)
    for one in parts:
        total.add(ALL, one.clone())
    torch.testing.assert_close(total.total.double(), sum(one.double() for one in parts), rtol=0, atol=1e-6)


def test_a_row_that_an_index_names_twice_has_both_in_float32():
    index = RowSet(4, None, torch.tensor([5, 0, 5, 5]))
    total, given = GradientSum(part(ALL, 1), BFLOAT16), part(index, 2)
    total.add(index, given)
    assert total.total.dtype == FLOAT32
    torch.testing.assert_close(total.total[5], given[[0, 2, 3]].float().sum(0))


def test_a_part_in_float32_is_not_rounded_before_it_is_added():
    total, given = GradientSum(part(ALL, 1), BFLOAT16), [part(ALL, seed, FLOAT32) for seed in (2, 3)]
    for one in given:
        total.add(ALL, one.clone())
    torch.testing.assert_close(total.total, given[0] + given[1])
