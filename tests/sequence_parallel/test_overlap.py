"""Exchanges begin before the attention that they overlap, and are waited for after it."""

import pytest

from tests.sequence_parallel.case import Case, Degrees, groups, plan_of, tensors
from tests.sequence_parallel.watching import watching


def events(case, backward=False):
    """Of one forward pass on this rank, or of the backward pass after it."""
    plan = plan_of(case, groups(case.degrees))
    whole = tensors(case)
    local = [plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])]
    if not backward:
        with watching() as log:
            plan.attention(*local)
        return log.events
    output = plan.attention(*(tensor.requires_grad_() for tensor in local))
    with watching() as log:
        output.sum().backward()
    return log.events


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_next_keys_travel_while_these_are_computed(pool, ranks):
    hop = ["travel", "attend", "arrived"]
    assert pool(ranks).run(events, Case(Degrees(ring=ranks), (24,))) == [hop * (ranks - 1) + ["attend"]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_gather_travels_while_own_keys_are_computed(pool, ranks):
    case = Case(Degrees(kv_gather=ranks), (24,))
    assert pool(ranks).run(events, case) == [["travel", "attend", "arrived", "attend"]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_next_heads_travel_while_these_are_computed(pool, ranks):
    case = Case(Degrees(ulysses=ranks), (24,), heads=4 * ranks, kv_heads=2 * ranks)
    first, second = ["travel", "arrived", "travel", "attend", "travel"], ["arrived", "attend", "travel", "arrived"]
    assert pool(ranks).run(events, case) == [[*first, *second]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_of_these_heads_travel_while_those_of_the_next_are_computed(pool, ranks):
    case = Case(Degrees(ulysses=ranks), (24,), heads=4 * ranks, kv_heads=2 * ranks)
    first, second = ["travel", "arrived", "travel", "attend", "travel"], ["arrived", "attend", "travel", "arrived"]
    assert pool(ranks).run(events, case, True) == [[*first, *second]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_keys_travel_while_the_gradients_of_own_ones_are_computed(pool, ranks):
    there, home = ["travel", "attend", "arrived", "attend"], ["travel", "arrived"]
    case = Case(Degrees(kv_gather=ranks), (24,))
    assert pool(ranks).run(events, case, True) == [there + home] * ranks


@pytest.mark.parametrize("ranks", [3, 4])
def test_gradients_travel_with_the_next_keys(pool, ranks):
    """At hop 0 the first keys, at hop 1 the second; then each hop's gradients and the keys of the next but one."""
    first, hop = ["travel", "attend", "arrived"], ["travel", "attend", "travel", "arrived"]
    case = Case(Degrees(ring=ranks), (24,))
    later = ["travel", "attend", "arrived", "travel", "arrived"]
    last = ["attend", "arrived", "travel", "arrived"]
    assert pool(ranks).run(events, case, True) == [first + hop + later * (ranks - 3) + last] * ranks


def test_of_two_ranks_gradients_only_come_home(pool):
    case = Case(Degrees(ring=2), (24,))
    expected = ["travel", "attend", "arrived", "attend", "travel", "arrived"]
    assert pool(2).run(events, case, True) == [expected] * 2
