"""Exchanges by copies into other ranks' memory: right in every mode, however late, and after an exception anywhere."""

import random
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from hal_attn.sequence_parallel import engine, exchange, peers, slots, ulysses
from tests.sequence_parallel.case import Case, Degrees, answer, groups, judge, plan_of, tensors
from tests.sequence_parallel.engines import engines, groups_with_copies, new_groups, posted, ways
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
INTERRUPTED = "an exchange was interrupted by an exception"


def by_copies(case):
    of = groups_with_copies(case.degrees)
    with engines():
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


def layer(case, plan, gradients, seed=0):
    """Output, or gradients."""
    whole = tensors(case.but(seed=seed))
    local = [plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])]
    if not gradients:
        with torch.no_grad():
            return [plan.attention(*local)]
    local = [tensor.clone().requires_grad_() for tensor in local]
    output = plan.attention(*local)
    # What is computed anew before the backward pass is another call in between.
    with torch.no_grad():
        plan.attention(*local)
    return [output.detach(), *torch.autograd.grad(output, local, 2 * output.detach() + 1)]


def layers(case, plan):
    """Layers with other values each, with and without gradients, at another pace on each rank."""
    found = []
    for seed in range(9):
        found += layer(case, plan, seed % 3 > 0, seed)
        time.sleep(random.random() / 200)
    return found


def same_by_both(case, least):
    expected = layers(case, plan_of(case, groups(case.degrees)))
    of = groups_with_copies(case.degrees)
    with engines(least):
        found = layers(case, plan_of(case, of))
    return max((float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if a.numel()), default=0.0)


@pytest.mark.parametrize("least", [1, 40])
@pytest.mark.parametrize("heads", [(4, 2), (7, 7), (3, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("degrees", MODES, ids=str)
def test_layers_keep_apart(pool, degrees, heads, least):
    """Kernels read slots where they lie, and each is written again by a later layer; some heads go by collectives."""
    case = Case(degrees, (40, 7, 3, 40), causal=True, heads=heads[0], kv_heads=heads[1])
    assert max(pool(degrees.world).run(same_by_both, case, least)) < 1e-5


def test_a_pipeline_has_no_more_turns_than_there_are_slots():
    """Heads of the next turn travel before the slot of this one is free."""
    assert engine._PIPELINE_TURNS <= slots.SLOTS


# After an exception


def planted(*_, **__):
    raise RuntimeError("planted")


@contextmanager
def failing(where):
    """Within it, this part of an exchange raises, on every rank."""
    if where == "second there":
        there = ulysses.HeadExchange.there
        outcomes = iter([there, planted])
        change = mock.patch.object(ulysses.HeadExchange, "there", lambda *a, **o: next(outcomes)(*a, **o))
    elif where == "receive":
        changes = [
            mock.patch.object(kind, "backward", lambda self, k, c, r, real=kind.backward: real(self, k, c, planted))
            for kind in (exchange.RingExchange, exchange.GatherExchange)
        ]
        with changes[0], changes[1]:
            yield
        return
    else:
        owner, name = {
            "back": (ulysses.HeadExchange, "back"),
            "results": (engine, "PartialStates"),
            "arrived": (ulysses, "_from_slot"),
            "driver": (peers, "set_flag"),
        }[where]
        change = mock.patch.object(owner, name, planted)
    with change:
        yield


def interrupted(degrees, where, gradients):
    case = Case(degrees, (40, 7), causal=True, heads=8, kv_heads=4)
    of = new_groups(degrees)
    with engines():
        plan = plan_of(case, of)
        before = layer(case, plan, gradients)
        with failing(where), pytest.raises(RuntimeError, match="planted"):
            layer(case, plan, gradients)
        told = {way.unavailable for way in ways(of)}
        after = [layer(case, plan, gradients) for _ in range(3)][-1]
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(after, before, strict=True)), told


@pytest.mark.parametrize(
    ("mode", "where", "gradients"),
    [
        ("ulysses", "results", False),
        ("ulysses", "back", False),
        ("ulysses", "back", True),
        ("ulysses", "second there", False),
        ("ulysses", "second there", True),
        ("ulysses", "arrived", False),
        ("ulysses", "driver", False),
        ("ring", "driver", True),
        ("ring", "receive", True),
        ("kv_gather", "receive", True),
    ],
)
def test_what_raises_on_every_rank_leaves_nobody_waiting(pool, mode, where, gradients):
    """What is under way is ended, and later calls go another way."""
    # What is kept for the backward pass is taken out of its slot before the next heads set out.
    told = None if (where, gradients) == ("second there", True) else INTERRUPTED
    assert pool(2).run(interrupted, Degrees(**{mode: 2}), where, gradients) == [(True, {told})] * 2


# Odd places


def summed_up(degrees):
    """Of a loss that sums over tokens, every row of the output's gradient is the same memory."""
    case = Case(degrees, (40, 7), heads=8, kv_heads=4)

    def gradients(of):
        plan = plan_of(case, of)
        whole = tensors(case)
        local = [plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])]
        local = [tensor.clone().requires_grad_() for tensor in local]
        (plan.attention(*local).sum(0) * whole["weight"][0]).sum().backward()
        return [tensor.grad for tensor in local]

    expected = gradients(groups(degrees))
    with engines():
        found = gradients(groups_with_copies(degrees))
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", ["ulysses", "ring", "kv_gather"])
def test_a_gradient_whose_rows_are_one(pool, mode):
    assert max(pool(2).run(summed_up, Degrees(**{mode: 2}))) < 1e-5


def after_so_many(degrees, count):
    case = Case(degrees, (40, 7), causal=True, heads=8, kv_heads=4)
    expected = layer(case, plan_of(case, groups(degrees)), False)
    of = new_groups(degrees)
    with engines():
        for way in ways(of):
            way._count = count
        plan = plan_of(case, of)
        found = []
        for _ in range(6):
            time.sleep(0.02 * torch.distributed.get_rank())
            found.append(layer(case, plan, False))
    return all(torch.equal(a, b) for each in found for a, b in zip(each, expected, strict=True))


@pytest.mark.parametrize("count", [2**31 - 3, 2**31 + 5, 2**32 - 3, 2**33 + 2**31])
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_numbers_are_cyclic(pool, mode, count):
    assert all(pool(2).run(after_so_many, Degrees(**{mode: 2}), count))
