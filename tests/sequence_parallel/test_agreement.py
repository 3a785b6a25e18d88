"""Ranks that disagree: an error on every rank that names what differs, at once; and a rank that dies."""

import os

import pytest
import torch

from hal_attn import HalAttnError, InvalidAttentionInputError, UnsupportedAttentionError
from hal_attn.sequence_parallel import SequenceParallelGroups
from tests.sequence_parallel.case import Case, Degrees, answer, groups, judge, plan_of, tensors
from tests.sequence_parallel.pool import Pool
from tests.sequence_parallel.watching import watching

CASE = Case(Degrees(ring=2), (9, 4))
DENSE = CASE.but(lengths=(9, 9), dense=True)


def disagree(pool, function, *args):
    """The errors of all ranks; the ranks work on together afterwards, so none was left waiting."""
    world = 3 if args and args[0] == 3 else 2
    errors = pool(world).errors(function, *args)
    case = CASE.but(degrees=Degrees(ring=world))
    judge(case, pool(world).run(answer, case))
    return errors


def make_plans(world, *by_rank):
    of = groups(Degrees(ring=world))
    of.plan(**by_rank[of.rank])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("same", "other", "told"),
    [
        ({"lengths": [9, 4]}, {"lengths": [9, 5]}, r"lengths: got .*\(9, 4\).*\(9, 5\)"),
        ({"lengths": [9]}, {"batch": 1, "seqlen": 9}, "batch: got .*None.*1"),
        ({"lengths": [9], "lengths_k": [3]}, {"lengths": [9], "lengths_k": [4]}, r"lengths_k: got .*\(3,\).*\(4,\)"),
        ({"lengths": [9], "causal": True}, {"lengths": [9]}, r"causal and window_size: got .*\(-1, 0\).*\(-1, -1\)"),
        ({"lengths": [9], "window_size": (2, 0)}, {"lengths": [9], "window_size": (3, 0)}, "window_size: got"),
        ({"lengths": [9]}, {"lengths": [9], "layout": "zigzag"}, "layout: got .*contiguous.*zigzag"),
        ({"lengths": [9]}, {"lengths": [9], "replicated_prefix": 1}, "replicated_prefix: got"),
        ({"lengths": [9]}, {"lengths": [9], "replicated_suffix": 1}, "replicated_suffix: got"),
        ({"lengths": [9], "lengths_k": [9]}, {"lengths": [9], "lengths_k": [9], "key_prefix": 1}, "key_prefix: got"),
        ({"lengths": [9]}, {"lengths": [9], "masks": "sharded"}, "masks: got .*whole.*sharded"),
        ({"lengths": [9], "num_heads": 4}, {"lengths": [9], "num_heads": 8}, "num_heads: got .*4.*8"),
        ({"lengths": [9]}, {"lengths": [9], "dtype": torch.bfloat16}, "dtype: got .*None.*bfloat16"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_plans_that_differ(pool, world, same, other, told):
    by_rank = [*[same] * (world - 1), other]
    for error in disagree(pool, make_plans, world, *by_rank):
        assert isinstance(error, InvalidAttentionInputError)
        assert error.args
        with pytest.raises(InvalidAttentionInputError, match=told):
            raise error
        assert f"rank {world - 1}: " in str(error)


def make_groups(*by_rank):
    rank = groups(Degrees(ring=2)).rank
    SequenceParallelGroups.create(**by_rank[rank])


def test_groups_that_differ(pool):
    for error in disagree(pool, make_groups, {"ring": 2}, {"ulysses": 2}):
        assert "rank 0: 2; rank 1: 1" in str(error)
    errors = disagree(pool, make_groups, {"ring": 2}, {"ring": 3})
    assert "on rank 1: InvalidAttentionInputError: ulysses, ring, kv_gather: got ring=3" in str(errors[0])
    assert "ulysses, ring, kv_gather: got ring=3" in str(errors[1])


def call(case, inputs=None, options=None, rank=1):
    """`plan.attention`, with other tensors or options on one rank."""
    plan = plan_of(case, groups(case.degrees))
    whole = tensors(case)
    given = {"query": plan.shard(whole["query"])}
    given |= {name: plan.shard_kv(whole[name]) for name in ("key", "value")}
    if plan.groups.rank == rank:
        given = {name: change(given[name]) if (change := (inputs or {}).get(name)) else given[name] for name in given}
    return plan.attention(**given, **((options or {}) if plan.groups.rank == rank else {}))


def half(tensor):
    return tensor.bfloat16()


def all_half():
    return {"query": half, "key": half, "value": half}


def one_row_less(tensor):
    return tensor[:-1]


def two_heads(tensor):
    return tensor[..., :2, :]


def narrow(tensor):
    return tensor[..., :4].contiguous()


def wants_gradient(tensor):
    return tensor.requires_grad_()


def not_a_tensor(tensor):
    return tensor.tolist()


@pytest.mark.parametrize(
    ("inputs", "options", "told"),
    [
        (all_half(), {}, "dtype: got rank 0: 'torch.float32'; rank 1: 'torch.bfloat16'"),
        ({"query": two_heads}, {}, r"query heads and head dim: got rank 0: \(4, 8\); rank 1: \(2, 8\)"),
        ({"value": narrow}, {}, r"value heads and head dim: got rank 0: \(2, 8\); rank 1: \(2, 4\)"),
        ({"query": narrow, "key": narrow}, {}, r"key heads and head dim: got rank 0: \(2, 8\); rank 1: \(2, 4\)"),
        ({"query": wants_gradient}, {}, "gradients: got rank 0: False; rank 1: True"),
        ({}, {"backend": "cpu_math"}, "backend: got rank 0: None; rank 1: 'cpu_math'"),
        ({}, {"scale": 0.5}, "scale: got rank 0: None; rank 1: 0.5"),
        ({}, {"softcap": 2.0}, "softcap: got rank 0: 0.0; rank 1: 2.0"),
        ({}, {"return_lse": True}, "return_lse: got rank 0: False; rank 1: True"),
        ({}, {"deterministic": True}, "deterministic: got rank 0: False; rank 1: True"),
        ({}, {"sinks": torch.zeros(4)}, r"sinks: got rank 0: 'NoneType'; rank 1: \(4,\)"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_calls_that_differ(pool, inputs, options, told):
    for error in disagree(pool, call, CASE, inputs, options):
        with pytest.raises(InvalidAttentionInputError, match=told):
            raise error


@pytest.mark.parametrize("masks", ["whole", "sharded"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mask": torch.ones(1, 1, 1, 9, dtype=torch.bool)}, "mask: got rank 0: None; rank 1: "),
        ({"key_padding_mask": None}, "key_padding_mask: got rank 0: False; rank 1: True"),
    ],
    ids=["mask", "key_padding_mask"],
)
def test_a_mask_on_one_rank(pool, masks, options, told):
    if "key_padding_mask" in options:
        options = {"key_padding_mask": torch.ones(2, 9 if masks == "whole" else 4, dtype=torch.bool)}
    for error in disagree(pool, call, DENSE.but(masks=masks), {}, options):
        with pytest.raises(InvalidAttentionInputError, match=told):
            raise error


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("case", "inputs", "options", "told"),
    [
        (CASE, {"query": one_row_less}, {}, "query: got shape .* on rank"),
        (CASE, {"key": one_row_less, "value": one_row_less}, {}, "key: got shape .* on rank"),
        (CASE, {"value": half}, {}, "value: got dtype torch.bfloat16"),
        (CASE, {"query": not_a_tensor}, {}, "query: got a list"),
        (CASE, {}, {"softcap": -1.0}, "softcap: got -1.0"),
        (CASE, {}, {"sinks": torch.zeros(3)}, r"sinks: got shape \(3,\)"),
        (CASE, {}, {"mask": torch.ones(1, 1, 9, 9)}, "mask: got given; allowed: none: this plan is packed"),
        (CASE, {}, {"backend": "no_such_backend"}, "no_such_backend"),
        (DENSE, {}, {"mask": torch.ones(1, 1, 9, 8, dtype=torch.bool)}, r"mask: got shape \(1, 1, 9, 8\)"),
        (DENSE.but(masks="sharded"), {}, {"mask": torch.ones(1, 1, 9, 9)}, r"mask: got shape \(1, 1, 9, 9\)"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_one_rank_is_wrong(pool, rank, case, inputs, options, told):
    errors = disagree(pool, call, case, inputs, options, rank)
    with pytest.raises(HalAttnError, match=told):
        raise errors[rank]
    with pytest.raises(InvalidAttentionInputError, match=f"the sequence parallel group: got on rank {rank}: .*{told}"):
        raise errors[1 - rank]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"lengths": [9, -1]}, "lengths: got -1"),
        ({"lengths": [9], "window_size": 3}, "window_size: got 3"),
        ({"lengths": None}, "lengths: got lengths=None"),
        ({"lengths": 9}, "TypeError"),
    ],
    ids=["length", "window", "nothing", "type"],
)
def test_one_plan_is_wrong(pool, wrong, told):
    errors = disagree(pool, make_plans, 2, {"lengths": [9]}, wrong)
    assert isinstance(errors[0], InvalidAttentionInputError)
    with pytest.raises(InvalidAttentionInputError, match=f"the sequence parallel group: got on rank 1: .*{told}"):
        raise errors[0]


def call_twice(case, backend):
    """The backends of a call by this name, and of the same call again."""
    plan, found = plan_of(case, groups(case.degrees)), []
    for _ in range(2):
        with watching() as log:
            plan.attention(*_parts(plan, case), backend=backend)
        found.append(log.backends)
    return found


def test_a_backend_that_does_not_take_the_calls_of_one_rank(pool):
    """cpu_sdpa takes no causal call of fewer keys than queries, as only some ranks have them in this ring."""
    case = Case(Degrees(ring=4), (0, 7, 14, 14), causal=True)
    taken, refused = [], []
    for rank, error in enumerate(pool(4).errors(call_twice, case, "cpu_sdpa")):
        (refused if isinstance(error, UnsupportedAttentionError) else taken).append(rank)
        assert "no backend takes this call" in str(error)
        assert "cpu_sdpa" in str(error)
    assert taken
    assert refused


def test_a_backend_is_chosen_once_for_the_group(pool):
    """cpu_sdpa would take the calls of some ranks; a list of names is tried for all."""
    case = Case(Degrees(ring=4), (0, 7, 14, 14), causal=True)
    for backend in (None, "cpu_math", ["cpu_sdpa", "cpu_math"]):
        found = pool(4).run(call_twice, case, backend)
        names = set().union(*(each for by_rank in found for each in by_rank))
        assert len(names) == 1
        assert names <= ({"cpu_math"} if backend else {"cpu_flash", "cpu_sdpa", "cpu_math"})


def die_on(rank, case):
    plan = plan_of(case, groups(case.degrees))
    plan.attention(*_parts(plan, case))
    if plan.groups.rank == rank:
        os._exit(1)
    plan.attention(*_parts(plan, case))


def _parts(plan, case):
    whole = tensors(case)
    return plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])


@pytest.mark.parametrize("degrees", [Degrees(ring=3), Degrees(ulysses=3), Degrees(kv_gather=3)], ids=str)
def test_a_rank_that_dies(degrees):
    with Pool(degrees.world, group_seconds=5) as own:
        outcomes = own.outcomes(die_on, 1, CASE.but(degrees=degrees), seconds=30)
    assert outcomes[1].trace == "died with exit code 1"
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RuntimeError), outcomes[rank].trace
