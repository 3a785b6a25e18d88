"""Errors against float64, the same inputs on one rank and on four."""

import pytest
import torch

from tests.sequence_parallel.case import Case, Degrees, answer, plans, right_answer

CASE = Case(Degrees(), (192,), heads=2, head_dim=32, value_head_dim=32, causal=True, seed=3)


def root_mean_square(pool, case):
    """Of the output and of the gradients of query, key and value, over all ranks."""
    right = right_answer(case)
    results = pool(case.degrees.world).run(answer, case)
    found = []
    for name in ("output", "query", "key", "value"):
        errors = [
            (result[name].double() - (plan.shard_kv if name in ("key", "value") else plan.shard)(right[name])).flatten()
            for plan, result in zip(plans(case), results, strict=True)
        ]
        found.append(torch.cat(errors).square().mean().sqrt().item())
    return found


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "degrees", [Degrees(ring=4), Degrees(kv_gather=4), Degrees(ulysses=2, ring=2), Degrees(ulysses=4)], ids=str
)
@pytest.mark.parametrize(
    # Joining states in float32 rounds once more, which shows beside a kernel that itself rounds to float32.
    ("dtype", "factor"),
    [(torch.bfloat16, 1.25), (torch.float32, 2.0)],
    ids=str,
)
def test_errors_do_not_grow_with_the_ranks(pool, degrees, dtype, factor, layout):
    case = CASE.but(dtype=dtype, layout=layout, heads=4, kv_heads=4)
    alone, together = root_mean_square(pool, case), root_mean_square(pool, case.but(degrees=degrees))
    for one, four in zip(alone, together, strict=True):
        assert four <= factor * one


@pytest.mark.parametrize("ranks", [3, 4])
def test_states_are_joined_in_float32(pool, ranks):
    """Where all keys weigh alike, each of n bfloat16 states has 1/n of the weight and rounding errors sqrt(n) as large:
    together they add as much as the last rounding does, however many there are."""
    case = CASE.but(dtype=torch.bfloat16, causal=False, heads=4, kv_heads=4, backend="cpu_math")
    alone, two, more = (root_mean_square(pool, case.but(degrees=Degrees(ring=n)))[0] for n in (1, 2, ranks))
    assert two <= 1.5 * alone
    assert more <= 1.1 * two
