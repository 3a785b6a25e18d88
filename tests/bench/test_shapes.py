"""The shapes of `hal-attn bench kernels`: the ten by default, and the flags."""

import pytest
import torch

from hal_attn.bench.kernels.row import FORWARD, Row, as_json, from_json
from hal_attn.bench.kernels.shapes import default_problems, parse_packed, parse_shape, quick_problems, short
from hal_attn.bench.problem import Problem
from hal_attn.errors import InvalidAttentionInputError

DTYPE = torch.bfloat16


def test_the_default_is_seven_batched_and_three_packed():
    found = [short(problem) for problem in default_problems(DTYPE, scaled=False)]
    assert found == [
        "B16 S1024 H16 D128 causal",
        "B4 S4096 H16 D128 causal",
        "B1 S16384 H16 D128 causal",
        "B1 S16384 H16 D128 full",
        "B4 S4096 H32/8 D128 causal",
        "B4 S4096 H32 D64 full",
        "B2 S8192 H16 D64 causal",
        "packed 16384..32, 10 seq. H16 D128 full",
        "packed 16384..32, 10 seq. H32/8 D128 causal",
        "packed 20 x 1500 H16 D64 full",
    ]


@pytest.mark.parametrize(
    "problems", [default_problems(DTYPE, scaled=True), quick_problems(DTYPE)], ids=["cpu", "quick"]
)
def test_smaller_shapes_are_other_shapes_with_whole_groups_of_heads(problems):
    assert len({short(problem) for problem in problems}) == len(problems)
    for problem in problems:
        assert problem.heads % problem.kv_heads == 0 < problem.kv_heads
        assert problem.packed or len(set(problem.lengths)) == 1
        assert problem.tokens <= 4096


def test_quick_has_both_kinds():
    assert [problem.packed for problem in quick_problems(DTYPE)] == [False, True]


def test_operations_count_the_pairs_that_are_seen():
    assert parse_shape("B=2,S=3,H=4,D=8", DTYPE).operations == 2 * 4 * 9 * 4 * 8
    assert parse_shape("B=2,S=3,H=4,D=8,causal", DTYPE).operations == 2 * 4 * 6 * 4 * 8
    assert parse_packed("3,2,H=4,D=8", DTYPE).operations == 4 * (9 + 4) * 4 * 8


@pytest.mark.parametrize(
    ("parse", "text", "wanted"),
    [
        (parse_shape, "S=5,H=2,D=8", Problem((5,), False, 2, 2, 8, DTYPE, False)),
        (parse_shape, "b=3, s=5, h=4/2, d=8, Causal", Problem((5, 5, 5), False, 4, 2, 8, DTYPE, True)),
        (parse_packed, "7,2x3,1", Problem((7, 3, 3, 1), True, 16, 16, 128, DTYPE, False)),
        (parse_packed, "7,H=4/2,D=8,causal", Problem((7,), True, 4, 2, 8, DTYPE, True)),
    ],
)
def test_a_flag_says_a_shape(parse, text, wanted):
    assert parse(text, DTYPE) == wanted


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_shape, "S=5,H=2"),
        (parse_shape, "S=5,H=2,D=8,window"),
        (parse_shape, "S=5,H=2,D=8,X=1"),
        (parse_shape, "S=0,H=2,D=8"),
        (parse_shape, "S=5,H=3/2,D=8"),
        (parse_shape, "S=-5,H=2,D=8"),
        (parse_shape, ""),
        (parse_packed, "H=2,D=8"),
        (parse_packed, "4,0"),
        (parse_packed, "4,0x3,x"),
        (parse_packed, "4,S=5"),
    ],
)
def test_what_is_no_shape_is_refused_with_an_example(parse, text):
    flag = "--shape" if parse is parse_shape else "--packed"
    with pytest.raises(InvalidAttentionInputError, match=f"{flag}: got "):
        parse(text, DTYPE)


def test_a_row_is_read_back_and_its_key_tells_lengths_apart():
    row = Row(parse_packed("7,3,1", DTYPE), "some", FORWARD, ms=1.0)
    assert from_json(as_json(row)) == row
    other = Row(parse_packed("7,2,1", DTYPE), "some", FORWARD, ms=1.0)
    assert row.key != other.key
