"""Sequences of a packed batch that lie whole on one coordinate, because others as long balance them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_attn.sequence_parallel.whole import Tokens, owners
from tests.sequence_parallel.case import Case, Degrees, groups, plan_of, plans, tensors
from tests.sequence_parallel.watching import watching


@pytest.mark.parametrize(
    ("lengths", "coordinates", "expected"),
    [
        ((900, 512, 510, 64, 64, 7), 2, (None, 0, 1, 1, 0, None)),
        ((8, 8, 8), 2, (0, 1, None)),
        ((8, 8, 8), 3, (0, 1, 2)),
        ((8, 8, 8), 4, (None,) * 3),
        ((8, 8, 8), 1, (None,) * 3),
        ((64, 63), 2, (0, 1)),
        ((64, 62), 2, (None, None)),
        ((640, 300, 630), 2, (0, None, 1)),
        ((), 2, ()),
    ],
)
def test_owners(lengths, coordinates, expected):
    assert owners([Tokens(length, length) for length in lengths], coordinates) == expected


def test_keys_count_as_queries_do():
    assert owners([Tokens(8, 8), Tokens(8, 64)], 2) == (None, None)
    assert owners([Tokens(8, 64), Tokens(8, 63)], 2) == (0, 1)
    pairs = [Tokens(64, 6400 - 60 * (index % 2) - 2 * index) for index in range(20)]
    found = owners(pairs, 2)
    keys = [sum(each.keys for each, owner in zip(pairs, found, strict=True) if owner == c) for c in range(2)]
    assert abs(keys[0] - keys[1]) <= 100


def test_what_is_replicated_is_no_one_s_to_balance():
    assert owners([Tokens(96, 96, (4, 0, 0)), Tokens(90, 90, (10, 0, 0))], 2) == (None, None)
    assert owners([Tokens(96, 96, (4, 0, 0)), Tokens(96, 96, (10, 0, 0))], 2) == (None, None)
    assert owners([Tokens(96, 96, (4, 0, 0)), Tokens(96, 96, (4, 0, 0))], 2) == (0, 1)
    for prefix in ((0, 1000, 0, 1000), (0, 512, 512, 0)):
        case = Case(Degrees(ring=2), (1024,) * 4, prefix=prefix)
        own = [plan.rows.own.numel() for plan in plans(case)]
        assert own == [sum(1024 - each for each in prefix) // 2] * 2


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3000), max_size=40), st.integers(2, 4))
def test_no_coordinate_has_much_more(lengths, coordinates):
    found = owners([Tokens(length, length) for length in lengths], coordinates)
    loads = [sum(n for n, owner in zip(lengths, found, strict=True) if owner == c) for c in range(coordinates)]
    assert max(loads) - min(loads) <= max(lengths, default=0) // 64
    work = [sum(n * n for n, owner in zip(lengths, found, strict=True) if owner == c) for c in range(coordinates)]
    assert max(work) <= 1.04 * min(work)
    assert sum(owner is not None for owner in found) % coordinates == 0


def held(lengths, **options):
    return [
        sorted(set(plan.rows.lengths)) and _tokens(plan) for plan in plans(Case(Degrees(ring=2), lengths, **options))
    ]


def _tokens(plan):
    return [sum(span.length for span, _ in pieces) for pieces in plan.rows.pieces]


def test_a_layout_that_is_asked_for_and_a_dense_batch_cut_everything():
    assert held((8, 8, 4)) == [[8, 0, 2], [0, 8, 2]]
    for layout in ("contiguous", "zigzag"):
        assert held((8, 8, 4), layout=layout) == [[4, 4, 2]] * 2
    assert held((8, 8), dense=True) == [[4, 4]] * 2


def test_the_report_says_how_many():
    texts = [str(plan) for plan in plans(Case(Degrees(ring=2), (8, 8, 4)))]
    assert all("whole       2 of the sequences, each on one coordinate" in text for text in texts)
    assert "whole " not in str(plans(Case(Degrees(ring=2), (8, 4)))[0])


def travelling(case):
    plan = plan_of(case, groups(case.degrees))
    whole = tensors(case)
    local = plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])
    with watching() as log:
        plan.attention(*local)
    return log.events, sum(sum(to.values()) for to in log.sent)


@pytest.mark.parametrize("mode", ["ring", "kv_gather"])
def test_nothing_of_them_travels(pool, mode):
    row = 2 * 2 * 8 * 4
    all_whole = Case(Degrees(**{mode: 2}), (12, 8, 12, 8), heads=2, kv_heads=2, head_dim=8)
    assert [sent for _, sent in pool(2).run(travelling, all_whole)] == [0, 0]
    one_cut = all_whole.but(lengths=(12, 8, 12, 8, 6))
    assert [sent for _, sent in pool(2).run(travelling, one_cut)] == [3 * row, 3 * row]
