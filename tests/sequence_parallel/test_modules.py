"""Each module is its plan's attention with the options of a layer."""

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
from tests.sequence_parallel.case import Case, Degrees, groups, place, plan_of, tensors

BY_MODE = {
    LocalAttention: Degrees(),
    UlyssesAttention: Degrees(ulysses=2),
    KVGatherAttention: Degrees(kv_gather=2),
    RingAttention: Degrees(ring=2),
    USPAttention: Degrees(ulysses=2, ring=2),
}
OPTIONS = {"scale": 0.4, "softcap": 2.0, "deterministic": True}


def as_module(cls, case):
    """Whether a module gives what its plan gives, gradients of its sinks too."""
    plan = plan_of(case, groups(case.degrees) if case.degrees.world > 1 else place(case.degrees, 0))
    whole = tensors(case)
    local = plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])
    sinks = whole["sinks"].clone().requires_grad_()
    module = cls(plan, sinks=nn.Parameter(whole["sinks"].clone()), **OPTIONS)
    given, expected = module(*local, return_lse=True), plan.attention(*local, sinks=sinks, return_lse=True, **OPTIONS)
    given[0].sum().backward()
    expected[0].sum().backward()
    pairs = [*zip(given, expected, strict=True), (module.sinks.grad, sinks.grad), (module(*local), expected[0])]
    return all(torch.equal(*pair) for pair in pairs) and list(module.state_dict()) == ["sinks"]


@pytest.mark.parametrize("cls", BY_MODE, ids=lambda cls: cls.__name__)
def test_a_module_is_its_plans_attention(pool, cls):
    case = Case(BY_MODE[cls], (9, 4), causal=True, sinks=True)
    if cls is LocalAttention:
        assert as_module(cls, case)
    else:
        assert pool(case.degrees.world).run(as_module, cls, case) == [True] * case.degrees.world


def test_sinks_that_are_not_trained_are_a_buffer():
    module = LocalAttention(plan_of(Case(Degrees(), (4,)), place(Degrees(), 0)), sinks=torch.zeros(4))
    assert [name for name, _ in module.named_buffers()] == ["sinks"]
    assert not list(module.parameters())


@pytest.mark.parametrize("cls", BY_MODE, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("degrees", BY_MODE.values(), ids=str)
def test_a_module_takes_plans_of_its_mode(cls, degrees):
    plan = plan_of(Case(degrees, (9,)), place(degrees, 0))
    fits = degrees in (Degrees(), BY_MODE[cls]) or cls is USPAttention
    if fits:
        assert cls(plan).plan is plan
    else:
        with pytest.raises(InvalidAttentionInputError, match=f"plan: got a plan by {plan.groups.mode}"):
            cls(plan)


def test_the_plan_of_a_module_may_change():
    first, second = (plan_of(Case(Degrees(), lengths), place(Degrees(), 0)) for lengths in ((4,), (7, 2)))
    module = RingAttention(first)
    module.plan = second
    assert module.plan is second
    with pytest.raises(InvalidAttentionInputError, match="a plan by ulysses"):
        module.plan = plan_of(Case(Degrees(ulysses=2), (4,)), place(Degrees(ulysses=2), 0))
