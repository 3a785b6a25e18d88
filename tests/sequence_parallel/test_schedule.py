"""What is computed where, without processes: each visible pair once, on one rank; nothing that nobody sees travels."""

import pytest
import torch
from hypothesis import given, settings

from tests.sequence_parallel.case import Case, Degrees, plans
from tests.sequence_parallel.strategies import cases
from tests.support import visible_pairs


def rows_of(row_set):
    if row_set.index is not None:
        return row_set.index
    start = row_set.start or 0
    return torch.arange(start, start + row_set.count)


def pairs_of(call, tokens_q, tokens_k):
    """[query token, key token] of every pair that a kernel call computes."""
    queries, keys = tokens_q[rows_of(call.queries)], tokens_k[rows_of(call.keys)]
    found, begin, begin_k = [torch.zeros(0, 2, dtype=torch.int64)], 0, 0
    for length, length_k in zip(call.sequences.lengths, call.sequences.lengths_k, strict=True):
        seen = visible_pairs(length, length_k, call.causal, call.window_size).nonzero()
        found.append(torch.stack([queries[begin + seen[:, 0]], keys[begin_k + seen[:, 1]]], 1))
        begin, begin_k = begin + length, begin_k + length_k
    return torch.cat(found)


def arriving(schedule, rank):
    """The tokens of the key buffers of each hop."""
    own = [schedule.chunks_k[rank].tokens]
    if schedule.ranks == 1:
        return own
    if schedule.gathered:
        others = [schedule.needed(rank, source).tokens for source in range(schedule.ranks) if source != rank]
        return [*own, torch.cat(others)]
    return own + [schedule.travelling[(rank - hop) % schedule.ranks].tokens for hop in schedule.hops[1:]]


def computed(schedule):
    """All pairs of all ranks."""
    found = [torch.zeros(0, 2, dtype=torch.int64)]
    for rank in range(schedule.ranks):
        buffers = arriving(schedule, rank)
        hops = schedule.calls(rank)
        assert len(hops) == len(buffers)
        for calls, tokens_k in zip(hops, buffers, strict=True):
            found += [pairs_of(call, schedule.chunks_q[rank].tokens, tokens_k) for call in calls]
    return torch.cat(found)


def band(case):
    """The pairs of the whole batch, [query token, key token]."""
    found, begin, begin_k = [torch.zeros(0, 2, dtype=torch.int64)], 0, 0
    for length, length_k in zip(case.lengths, case.keys, strict=True):
        seen = visible_pairs(length, length_k, case.causal, case.window_size).nonzero()
        found.append(seen + torch.tensor([begin, begin_k]))
        begin, begin_k = begin + length, begin_k + length_k
    return torch.cat(found)


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_each_visible_pair_is_computed_once(world):
    @settings(max_examples=300)
    @given(cases(world))
    def check(case):
        schedule = plans(case)[0].schedule
        pairs = computed(schedule)
        once = pairs.unique(dim=0)
        assert torch.equal(once, band(case)), "other pairs than the band"
        assert pairs.shape[0] == once.shape[0], "a pair is computed twice"

    check()


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_no_call_is_empty_and_no_sequence_of_one_has_one_side_only(world):
    @settings(max_examples=200)
    @given(cases(world))
    def check(case):
        schedule = plans(case)[0].schedule
        calls = [call for rank in range(schedule.ranks) for hop in schedule.calls(rank) for call in hop]
        for call in calls:
            lengths = zip(call.sequences.lengths, call.sequences.lengths_k, strict=True)
            assert all(queries > 0 and keys > 0 for queries, keys in lengths)
            assert rows_of(call.queries).unique().numel() == call.queries.count, "a query row is merged twice at once"

    check()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("lengths", [(4096,), (1000, 24, 3000, 517), (97,) * 40], ids=["one", "unequal", "many"])
def test_zigzag_balances_causal_work(ranks, lengths):
    def work(layout):
        schedule = plans(Case(Degrees(ring=ranks), lengths, causal=True, layout=layout))[0].schedule
        return [sum(c.scores for hop in schedule.calls(rank) for c in hop) for rank in range(ranks)]

    zigzag, contiguous = work("zigzag"), work("contiguous")
    assert sum(zigzag) == sum(contiguous) == sum(n * (n + 1) // 2 for n in lengths)
    assert max(zigzag) <= 1.05 * min(zigzag)
    assert max(contiguous) > 2 * min(contiguous)


@pytest.mark.parametrize(
    ("options", "zigzag"),
    [({"causal": True}, True), ({}, False), ({"causal": True, "window_size": (3, 0)}, False)],
    ids=["causal", "full", "window"],
)
def test_the_layout_chosen(options, zigzag):
    description = plans(Case(Degrees(ring=2), (9,), **options))[0].description
    assert description.zigzag == zigzag
    assert description.why
    assert not plans(Case(Degrees(ulysses=2), (9,), **options))[0].description.zigzag


def test_hops_that_no_query_needs_are_left_out():
    """A window of 4 in 64 tokens over 8 ranks: keys come from the rank before, and from no other."""
    case = Case(Degrees(ring=8), (64,), causal=True, window_size=(4, 0), layout="contiguous")
    assert plans(case)[0].schedule.hops == (0, 1)
    ahead = case.but(causal=False, window_size=(0, 4))
    assert plans(ahead)[0].schedule.hops == (0, 7)
    causal = case.but(window_size=None)
    assert plans(causal)[0].schedule.hops == tuple(range(8))
