"""Sequences of a packed batch that lie whole on one coordinate, because others balance them, or how one is cut."""

import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_attn.sequence_parallel.sharding import Sharding
from hal_attn.sequence_parallel.whole import Tokens, _Batch, owners, placed
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


CAUSAL, FULL, WINDOW, AROUND = (-1, 0), (-1, -1), (100, 0), (50, 50)
BANDS = (CAUSAL, FULL, WINDOW, AROUND, (-1, 9))


@pytest.mark.parametrize(
    ("lengths", "coordinates", "band", "expected", "uneven"),
    [
        # One is cut, the longest, so that both have as many tokens and as much work.
        ((8192, 4096, 2048, 1024, 1024), 2, CAUSAL, (None, 0, 1, 0, 1), {0}),
        ((900, 512, 400, 64, 7), 2, CAUSAL, (None, 0, 1, 1, 1), {0}),
        ((64, 900, 400), 3, CAUSAL, (1, None, None), {1}),
        ((9000, 4000, 3000, 20), 3, AROUND, (None, 0, 1, 2), {0}),
        # Or two, of different lengths, where all see all.
        ((8192, 4096, 2048, 128, 64), 2, FULL, (None, None, 0, 1, 1), {0, 1}),
        ((640, 320, 100, 420, 90), 2, FULL, (None, 0, 1, None, 1), {0, 3}),
        # Others about as long balance what is whole, and no other has to be cut.
        ((600, 400, 395, 205), 2, FULL, (None, 0, 1, None), set()),
        ((1600, 800, 20, 1595, 795, 11), 2, FULL, (0, 1, 1, 1, 0, 0), set()),
        ((1600, 1600, 6), 2, CAUSAL, (0, 1, 0), set()),
        # The longest are cut in like parts.
        ((640, 640, 320, 100, 90), 2, FULL, (0, 1, None, 0, 1), set()),
        ((1000, 400, 300, 20), 3, WINDOW, (None, None, None, None), set()),
        ((90, 80, 70), 3, FULL, (None, None, None), set()),
        ((8, 4), 2, FULL, (None, None), set()),
        ((8, 4), 1, CAUSAL, (None, None), set()),
        ((8,), 2, CAUSAL, (None,), set()),
        ((), 2, CAUSAL, (), set()),
    ],
)
def test_placed(lengths, coordinates, band, expected, uneven):
    found = placed([Tokens(length, length) for length in lengths], coordinates, band, band == CAUSAL)
    assert found.owners == expected
    assert found.uneven.keys() == uneven


def test_only_queries_that_are_the_keys_are_cut_unevenly():
    assert placed([Tokens(90, 90), Tokens(40, 40)], 2, CAUSAL, True).uneven
    assert not placed([Tokens(90, 91), Tokens(40, 40)], 2, CAUSAL, True).uneven
    assert not placed([Tokens(90, 90), Tokens(40, 40, (0, 2, 0))], 2, CAUSAL, True).uneven
    # What is whole may be of any form, as long as keys are balanced too.
    assert placed([Tokens(90, 90), Tokens(40, 60), Tokens(40, 60)], 2, CAUSAL, True).owners == (None, 0, 1)
    assert placed([Tokens(900, 900), Tokens(400, 405)], 2, CAUSAL, True).uneven
    assert not placed([Tokens(900, 900), Tokens(400, 500)], 2, CAUSAL, True).uneven


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 600), st.just(0) | st.integers(0, 40)), max_size=40),
    st.integers(2, 5),
    st.sampled_from(BANDS),
    st.booleans(),
)
def test_what_is_not_all_cut_in_like_parts_is_balanced(lengths, coordinates, band, zigzag):
    """Counted query by query, with what is cut in like parts, and with sequences of more keys than queries."""
    sequences = [Tokens(queries, queries + more) for queries, more in lengths]
    found = placed(sequences, coordinates, band, zigzag)
    sides = (tuple(each.queries for each in sequences), tuple(each.keys for each in sequences))
    none = (0,) * len(sequences)
    dealt = [Sharding(side, none, none, found, coordinates, 1, zigzag)._dealt for side in sides]
    loads = [[0, 0, 0] for _ in range(coordinates)]
    for each, spans, spans_k in zip(sequences, *dealt, strict=True):
        assert sorted(place for own in spans for span in own for place in range(*span)) == [*range(each.queries)]
        for load, own, own_k in zip(loads, spans, spans_k, strict=True):
            load[0] += sum(span.length for span in own)
            load[1] += sum(span.length for span in own_k)
            load[2] += sum(seen(place, each, band) for span in own for place in range(*span))
    owned = owners(sequences, coordinates)
    if found.owners == owned and not found.uneven:
        return
    reach = max([0, *(sequences[index].queries for index in found.uneven)])
    slack = (1, 1, 2 * min(reach, sum(band) + 1 if min(band) >= 0 else reach)) if found.uneven else (0, 0, 0)
    for side, off in zip(zip(*loads, strict=True), slack, strict=True):
        assert max(side) - min(side) <= max(sum(side) / coordinates / 64, off)


def seen(query, sequence, band):
    left, right = band
    place = query + sequence.keys - sequence.queries
    first = 0 if left < 0 else max(0, place - left)
    return max(0, (sequence.keys if right < 0 else min(sequence.keys, place + right + 1)) - first)


@pytest.mark.parametrize(
    ("options", "layout", "most"),
    [
        ({"causal": True}, "zigzag", 1.02),
        ({}, "contiguous", 1.02),
        # Windows that hide nothing are none.
        ({"causal": True, "window_size": (799, 799)}, "zigzag", 1.02),
        ({"window_size": (799, 0)}, "zigzag", 1.02),
        ({"window_size": (900, 900)}, "contiguous", 1.02),
        # Long ones are as causal, short ones not.
        ({"window_size": (600, 0)}, "zigzag", 1.1),
        ({"window_size": (10, 0)}, "contiguous", 1.05),
    ],
)
@pytest.mark.parametrize("shape", [{"lengths": (800, 310, 150)}, {"lengths": (800,) * 2, "dense": True}], ids=str)
def test_the_work_of_each_rank(options, layout, most, shape):
    made = plans(Case(Degrees(ring=3), **shape, **options))
    schedule = made[0].schedule
    scores = [sum(call.scores for hop in schedule.calls(rank) for call in hop) for rank in range(3)]
    assert f"layout      {layout}" in str(made[0])
    assert max(scores) <= most * sum(scores) / 3


@pytest.mark.parametrize("coordinates", [8, 64])
def test_thousands_of_sequences_are_placed_in_few_tries(coordinates):
    """As many placements are tried as grow with the logarithm of how many sequences there are."""
    draw = random.Random(0)
    batch = [Tokens(n, n) for n in (min(60_000, int(64 * draw.paretovariate(0.8))) for _ in range(2000))]
    for band in (CAUSAL, FULL, WINDOW):
        with mock.patch.object(_Batch, "whole", autospec=True, side_effect=_Batch.whole) as tried:
            placed(batch, coordinates, band, band == CAUSAL)
        assert 1 <= tried.call_count <= 50


@pytest.mark.parametrize(
    ("band", "count", "most"),
    [(CAUSAL, 16, 1.6), (CAUSAL, 64, 0.1), (FULL, 16, 3.5), (FULL, 64, 0.1), (WINDOW, 16, 2.2), (WINDOW, 64, 0.1)],
)
@pytest.mark.parametrize("coordinates", [2, 3, 4])
def test_few_are_cut(band, count, most, coordinates):
    """On average, as the docs say."""
    draw, cut = random.Random(0), 0
    for _ in range(100):
        batch = [Tokens(length, length) for length in draw.choices(range(32, 4097), k=count)]
        cut += placed(batch, coordinates, band, band == CAUSAL).owners.count(None)
    assert cut / 100 <= most


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
    uneven = [str(plan) for plan in plans(Case(Degrees(ring=2), (4, 80, 40, 20, 10), causal=True))]
    assert all("each on one coordinate: the cut of 1 evens out what each has" in text for text in uneven)
    assert "whole       4 of the sequences" in uneven[0]


@pytest.mark.parametrize("degrees", [Degrees(ring=2), Degrees(kv_gather=3), Degrees(ulysses=2, ring=2)], ids=str)
def test_an_uneven_cut_balances_rows_and_work(degrees):
    made = plans(Case(degrees, (1000, 500, 250, 125, 60, 60), causal=True))
    rows = [plan.rows.count for plan in made]
    assert max(rows) - min(rows) <= 2
    assert made[0].schedule.queries.placement.uneven
    schedule = made[0].schedule
    scores = [sum(call.scores for hop in schedule.calls(rank) for call in hop) for rank in range(schedule.ranks)]
    assert max(scores) <= 1.01 * min(scores)


def test_what_is_cut_unevenly_takes_no_gathers():
    """One call at each hop, on views of the rows."""
    for plan in plans(Case(Degrees(ring=2), (1000, 500, 250, 125, 60, 60), causal=True)):
        calls = [call for hop in plan.schedule.calls(plan.groups.rank) for call in hop]
        assert len(calls) == 2
        assert all(rows.index is None for call in calls for rows in (call.queries, call.keys))


def test_ulysses_takes_the_batch_as_one_run():
    """So that what arrives is in order, and what leaves lies together."""
    for degrees in (Degrees(ulysses=3), Degrees(ulysses=2, ring=2)):
        for plan in plans(Case(degrees, (40, 7, 0, 3, 21, 30))):
            for side in (plan.engine.queries, plan.engine.keys):
                assert side.arrange.all
                assert all(rows.index is None for rows in side.of_rank)
    rows = [plan.rows.count for plan in plans(Case(Degrees(ulysses=4), (1,) * 9 + (9, 3)))]
    assert max(rows) - min(rows) <= 1
    named = plans(Case(Degrees(ulysses=2), (4, 6), layout="contiguous"))
    assert [plan.positions.tolist() for plan in named] == [[0, 1, 0, 1, 2], [2, 3, 3, 4, 5]]
    alone = plans(Case(Degrees(ulysses=2), (4, 6)))
    assert [plan.positions.tolist() for plan in alone] == [[0, 1, 2, 3, 0], [1, 2, 3, 4, 5]]


def travelling(case):
    plan = plan_of(case, groups(case.degrees))
    whole = tensors(case)
    local = plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])
    with watching() as log:
        plan.attention(*local)
    return log.events, sum(sum(to.values()) for to in log.sent)


def said(case):
    plan = groups(case.degrees).plan(list(case.lengths), num_heads=4, head_dim=8, dtype=torch.float32)
    return str(plan)


@pytest.mark.parametrize("mode", ["ring", "kv_gather"])
def test_the_report_where_nothing_travels(pool, mode):
    for text in pool(2).run(said, Case(Degrees(**{mode: 2}), (12, 8, 12, 8))):
        assert "forward: this rank sends 0 B a layer" in text
        assert "and backward: this rank sends 0 B a layer" in text


@pytest.mark.parametrize("mode", ["ring", "kv_gather"])
def test_nothing_of_them_travels(pool, mode):
    row = 2 * 2 * 8 * 4
    all_whole = Case(Degrees(**{mode: 2}), (12, 8, 12, 8), heads=2, kv_heads=2, head_dim=8)
    assert pool(2).run(travelling, all_whole) == [(["attend"], 0)] * 2
    one_cut = all_whole.but(lengths=(12, 8, 12, 8, 6))
    assert [sent for _, sent in pool(2).run(travelling, one_cut)] == [3 * row, 3 * row]
