"""Exchanges by copies into other ranks' memory: right in every mode, in any order of ranks, and after an exception."""

import random
import time
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from hal_attn.sequence_parallel import engine
from tests.sequence_parallel.case import Case, Degrees, answer, groups, judge, plan_of, tensors
from tests.sequence_parallel.engines import engines, groups_with_copies, posted
from tests.sequence_parallel.strategies import cases

MODES = [
    *(Degrees(**{mode: ranks}) for mode in ("ulysses", "ring", "kv_gather") for ranks in (2, 3, 4)),
    Degrees(ulysses=2, ring=2),
    Degrees(ulysses=2, kv_gather=2),
]
LENGTHS = (23, 9, 1, 9, 30)
CASES = {
    "full": {},
    "causal": {"causal": True},
    "cut": {"causal": True, "layout": "zigzag"},
    "one": {"lengths": (41,)},
    "dense": {"lengths": (13, 13), "dense": True, "causal": True},
    "replicated": {"prefix": (3, 0, 0, 2, 1), "suffix": (1, 2, 0, 0, 4), "key_prefix": (0, 2, 0, 1, 0), "sinks": True},
    "key heads shared": {"heads": 6, "kv_heads": 1, "causal": True},
    "heads that do not divide": {"heads": 7, "kv_heads": 7},
    "cross": {"lengths_k": (4, 17, 0, 8, 2), "value_head_dim": 20},
    "through the LSE": {"lse_weight": True, "causal": True},
    "bfloat16": {"dtype": torch.bfloat16, "causal": True},
}


def by_copies(case):
    with engines():
        of = groups_with_copies(case.degrees)
        before = posted(of)
        return answer(case, of), posted(of) - before


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("degrees", MODES, ids=str)
def test_right_and_taken(pool, degrees, name):
    case = Case(degrees, **{"lengths": LENGTHS, "seed": 3, **CASES[name]})
    found = pool(degrees.world).run(by_copies, case)
    judge(case, [values for values, _ in found])
    assert all(count > 0 for _, count in found), "nothing went by copies"


@pytest.mark.parametrize("world", [2, 4])
def test_random_cases(pool, world):
    @settings(max_examples=40)
    @given(cases(world))
    def check(case):
        judge(case, [values for values, _ in pool(world).run(by_copies, case)])

    check()


def layers(case, plan):
    """Outputs of layers with other values each, at another pace on each rank, as they are once all are done."""
    found = []
    for seed in range(12):
        whole = tensors(case.but(seed=seed))
        local = plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])
        with torch.no_grad():
            found.append(plan.attention(*local))
        time.sleep(random.random() / 200)
    return found


def same_by_both(case):
    expected = layers(case, plan_of(case, groups(case.degrees)))
    with engines():
        found = layers(case, plan_of(case, groups_with_copies(case.degrees)))
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("degrees", MODES, ids=str)
def test_layers_without_gradients_keep_apart(pool, degrees):
    """Kernels read slots where they lie, and each is written again by a later layer."""
    assert all(pool(degrees.world).run(same_by_both, Case(degrees, (40, 7), causal=True)))


def interrupted(degrees):
    case = Case(degrees, (40, 7), causal=True)
    with engines():
        of = groups_with_copies.__wrapped__(degrees)
        plan = plan_of(case, of)
        before = layers(case, plan)
        with mock.patch.object(engine, "PartialStates", planted), pytest.raises(RuntimeError, match="planted"):
            layers(case, plan)
        ways = [way for way in (of.peers, of.peers_of_heads) if way is not None]
        told = {way.unavailable for way in ways}
        after = layers(case, plan)
    return all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), told


def planted(*_):
    raise RuntimeError("planted")


@pytest.mark.parametrize("mode", ["ulysses", "ring", "kv_gather"])
def test_what_raises_on_every_rank_leaves_nobody_waiting(pool, mode):
    """Where it raises before keys are sent, copies go on; where something is under way, other ways are taken."""
    for right, told in pool(2).run(interrupted, Degrees(**{mode: 2})):
        assert right
        assert told <= {None, "an exchange was interrupted by an exception"}
        assert mode != "ulysses" or told == {"an exchange was interrupted by an exception"}
