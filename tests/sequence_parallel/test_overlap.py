"""Exchanges begin before the attention that they overlap, and are waited for after it."""

import pytest

from tests.sequence_parallel.case import Case, Degrees, groups, plan_of, tensors
from tests.sequence_parallel.watching import watching


def events(case):
    """Of one forward pass on this rank."""
    plan = plan_of(case, groups(case.degrees))
    whole = tensors(case)
    local = plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])
    with watching() as log:
        plan.attention(*local)
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
