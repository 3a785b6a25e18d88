"""Compiled plans: any plan by one graph, on one rank and on several, with the gradients of the plan's own attention."""

import pytest
import torch
from torch import nn

from hal_attn import InvalidAttentionInputError
from hal_attn.sequence_parallel import (
    KVGatherAttention,
    LocalAttention,
    RingAttention,
    UlyssesAttention,
    USPAttention,
)
from hal_attn.sequence_parallel.compiled import PLAN_ATTENTION
from tests.compile.test_operators import check_both
from tests.compile.tracing import Program, gradients, leaves, same
from tests.sequence_parallel.case import Case, Degrees, groups, place, plan_of, tensors

BY_MODE = {
    UlyssesAttention: Degrees(ulysses=2),
    KVGatherAttention: Degrees(kv_gather=2),
    RingAttention: Degrees(ring=2),
    USPAttention: Degrees(ulysses=2, ring=2),
}
OPTIONS = {"scale": 0.4, "softcap": 2.0, "deterministic": True}


def plan_on(case):
    return plan_of(case, groups(case.degrees) if case.degrees.world > 1 else place(case.degrees, 0))


def as_its_plan(cls, cases):
    """Whether one compiled module gives what each plan in turn gives, gradients of its sinks too -> graphs compiled."""
    module, program, graphs = None, None, []
    for case in cases:
        plan, whole = plan_on(case), tensors(case)
        if module is None:
            module = cls(plan, sinks=nn.Parameter(whole["sinks"].clone()), **OPTIONS)
            program = Program(module, dynamic=True)
        module.plan = plan
        local = leaves(plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"]))
        result, right = program(*local, return_lse=True), module(*local, return_lse=True)
        same(result, right)
        every = (*local, module.sinks)
        same(gradients(result, every), gradients(right, every))
        with torch.no_grad():
            same(program(*local), right[0].detach())
        graphs.append(program.graphs)
    return graphs


@pytest.mark.parametrize("batched", [False, True], ids=["packed", "dense"])
def test_one_rank(batched):
    lengths = ((7, 7), (5, 5), (9, 9)) if batched else ((9, 4), (3, 5, 2), (6,))
    cases = [Case(Degrees(), each, dense=batched, causal=True, sinks=True) for each in lengths]
    assert len(set(as_its_plan(LocalAttention, cases))) == 1


@pytest.mark.parametrize("cls", BY_MODE, ids=lambda cls: cls.__name__)
def test_several_ranks(pool, cls):
    cases = [Case(BY_MODE[cls], lengths, causal=True, sinks=True) for lengths in ((61, 34), (48, 33, 57))]
    for graphs in pool(BY_MODE[cls].world).run(as_its_plan, cls, cases):
        assert len(set(graphs)) == 1


def test_masks():
    plan = plan_on(Case(Degrees(), (6, 6), dense=True, mask="bool", causal=False))
    query = torch.randn(2, 6, 4, 16, requires_grad=True)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()

    def model(query, mask):
        return plan.attention(query, query, query, mask=mask)

    result, right = Program(model)(query, mask), model(query, mask)
    same(result, right)
    torch.testing.assert_close(gradients(result, (query,)), gradients(right, (query,)))


def test_what_is_wrong_is_said_as_by_the_plan():
    plan = plan_on(Case(Degrees(), (4, 3)))

    def model(query, options):
        return plan.attention(query, query, query, **options)

    for query, options in (
        (torch.randn(7, 4, 16), {"deterministic": 1}),
        (torch.randn(6, 4, 16), {}),
        (torch.randn(7, 4, 16), {"softcap": -1.0}),
    ):
        with pytest.raises(InvalidAttentionInputError) as right:
            model(query, options)
        with pytest.raises(InvalidAttentionInputError) as found:
            Program(model)(query, options)
        assert str(found.value) == str(right.value)


def test_the_operators():
    plan = plan_on(Case(Degrees(), (4, 3)))
    query, key, value = (torch.randn(7, 4, 16) for _ in range(3))
    given = {"query": query, "key": key, "value": value, "sinks": torch.randn(4), "plan": plan.carrier}
    check_both(PLAN_ATTENTION, given, {"return_lse": True})


def test_a_plan_that_is_gone_is_refused():
    gone = plan_on(Case(Degrees(), (7,))).carrier
    query = torch.randn(7, 4, 16)
    with pytest.raises(InvalidAttentionInputError, match="plan: got one that is gone"):
        torch.ops.hal_attn.plan_attention(
            query, query, query, None, gone, None, None, None, 0.0, False, False, None, [False] * 4
        )
