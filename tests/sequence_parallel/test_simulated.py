"""Every mode over simulated vendors: their own kernels, and no sequence with one side only ever reaches them."""

import pytest
import torch

from tests.sequence_parallel.case import Case, Degrees, answer, assert_right, judge
from tests.sequence_parallel.watching import watching

# By device, the dtypes of its kernels.
DEVICES = {
    "ascend:Ascend910B1": (torch.float16, torch.bfloat16),
    "rocm:gfx942": (torch.float16, torch.bfloat16),
    "cuda:sm90": (torch.float16, torch.bfloat16),
}
DEGREES = [Degrees(ulysses=2), Degrees(kv_gather=2), Degrees(ring=2), Degrees(ring=3), Degrees(ulysses=2, ring=2)]
MANY = (9, 1, 0, 17, 2, 1, 6)


def watched(case):
    """This rank's answer, the lengths that reached its kernels, and the backends."""
    with watching() as log:
        found = answer(case)
    return found, log.sequences, log.backends


def case_of(degrees, dtype, **options):
    fields = {"lengths": MANY, "head_dim": 64, "value_head_dim": 64, "seed": 5, **options}
    return Case(degrees, dtype=dtype, **fields)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "layout": "contiguous"},
        {"lengths_k": (1, 5, 3, 0, 12, 1, 7)},
        {"window_size": (3, 0), "layout": "contiguous"},
        {"prefix": (2, 1, 0, 2, 1, 0, 3), "causal": True},
    ],
    ids=["zigzag", "contiguous", "cross", "window", "replicated"],
)
def test_one_sided_sequences_never_reach_the_kernel(pool, device, ranks, options):
    """Ascend rejects them: nothing here asks for `HAL_ATTN_EMPTY_SEQUENCES=compact`."""
    case = case_of(Degrees(ring=ranks), torch.float16, **options)
    results = pool(ranks).run(watched, case, environ={"HAL_ATTN_SIMULATE": device})
    judge(case, [found for found, _, _ in results])
    assert all(queries and keys for _, sequences, _ in results for queries, keys in sequences)
    chosen = {name for _, _, names in results for name in names}
    assert len(chosen) == 1, "one backend for the whole group"
    assert not {"cpu_flash", "cpu_sdpa", "cpu_math", None} & chosen


@pytest.mark.parametrize(("device", "dtype"), [(device, dtype) for device in DEVICES for dtype in DEVICES[device]])
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "heads": 6, "kv_heads": 2},
        {"window_size": (4, 1), "lse_weight": True},
        {"sinks": True, "softcap": 2.0, "prefix": (1, 0, 0, 2, 1, 0, 2)},
        {"lengths": (11, 11), "dense": True, "mask": ("bool", (True, True, True, True)), "padding": True},
    ],
    ids=["causal", "window", "softcap", "masked"],
)
def test_modes_over_simulated_vendors(pool, device, dtype, degrees, options):
    assert_right(pool, case_of(degrees, dtype, **options), {"HAL_ATTN_SIMULATE": device})


@pytest.mark.parametrize("empty_lse", ["inf", "-inf", "nan", "0"])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_see_nothing_in_a_hop(pool, device, empty_lse):
    """What a kernel gives as their LSE reaches no state."""
    case = case_of(Degrees(ring=3), torch.float16, lengths_k=(4, 7, 0, 3, 12, 6, 1), causal=True)
    assert_right(pool, case, {"HAL_ATTN_SIMULATE": f"{device},empty_lse={empty_lse}"})


@pytest.mark.parametrize("degrees", [Degrees(ring=2), Degrees(kv_gather=2)], ids=str)
@pytest.mark.parametrize("dtype", DEVICES["cuda:sm90"])
def test_replicated_rows_of_a_rank_whose_gradient_is_one_call_of_a_kernel(pool, degrees, dtype):
    """Of the first of two ranks, which sees no other's keys: the kernel's gradient of all rows, in its dtype."""
    case = case_of(degrees, dtype, lengths=(9, 8), causal=True, layout="contiguous", prefix=2)
    assert_right(pool, case, {"HAL_ATTN_SIMULATE": "cuda:sm90"})
