"""Faults that sequence parallelism is known for elsewhere, one test each, named by the fault."""

import pytest
import torch

from tests.sequence_parallel.case import Case, Degrees, answer, assert_right, judge
from tests.sequence_parallel.test_precision import root_mean_square


def ring(ranks, lengths, **options):
    return Case(Degrees(ring=ranks), lengths, **{"heads": 2, "kv_heads": 2, **options})


def ulysses(ranks, lengths, **options):
    return Case(Degrees(ulysses=ranks), lengths, **options)


FAULTS = {
    "zigzag_of_a_length_that_2n_does_not_divide": ring(4, (22,), dense=True, causal=True, layout="zigzag"),
    "weight_on_the_padding_of_unequal_shares": ring(3, (12,), lengths_k=(11,), dense=True, layout="contiguous"),
    "backward_with_the_keys_of_the_first_hop": ring(4, (8,), dense=True, layout="contiguous"),
    "replicated_prefix_counted_once_a_rank": ring(2, (11,), dense=True, prefix=3, layout="contiguous"),
    "lse_of_packed_sequences_laid_out_otherwise": ring(2, (8, 4, 4), heads=4, causal=True, layout="contiguous"),
    "zigzag_order_lost_on_the_way": ring(4, (16,), dense=True, causal=True, layout="zigzag"),
    "window_lost_at_the_border_of_shards": ring(
        3, (12,), dense=True, causal=True, window_size=(4, 0), layout="contiguous"
    ),
    "the_wrong_copy_of_a_key_head": ulysses(4, (6,), dense=True, heads=12, kv_heads=3),
    "a_length_that_the_ranks_do_not_divide": ulysses(2, (9,), dense=True, heads=4, kv_heads=4, causal=True),
    "a_length_of_7_on_two_ranks_treated_as_6": ring(2, (7,), dense=True),
    "triangle_in_off_diagonal_hops": ring(2, (8,), dense=True, causal=True, layout="contiguous"),
    "two_states_without_keys_merge_to_nan": ring(3, (9,), lengths_k=(3,), causal=True, layout="contiguous"),
    "a_mask_drops_causal": ring(
        2, (9, 9), dense=True, causal=True, mask=("bool", (True, True, True, True)), heads=4, kv_heads=2
    ),
    "a_padding_mask_reused_for_every_hop": ring(3, (12, 12), dense=True, padding=True, layout="contiguous"),
    "sinks_counted_once_a_rank": ring(3, (12,), sinks=True, causal=True),
    "sinks_counted_once_a_hop_of_replicated_queries": ring(2, (12,), sinks=True, prefix=4),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS.keys())
def test_fault(pool, case):
    assert_right(pool, case)


def test_bfloat16_error_grows_with_the_ring(pool):
    case = Case(Degrees(), (64,), dense=True, heads=2, kv_heads=2, head_dim=16, dtype=torch.bfloat16, causal=True)
    alone = root_mean_square(pool, case)
    together = root_mean_square(pool, case.but(degrees=Degrees(ring=4), layout="contiguous"))
    assert together[0] <= 1.25 * alone[0]


def test_the_head_counts_of_one_model_reach_the_next(pool):
    """Two models in the same processes, the first again after the second."""
    first = ulysses(4, (8,), dense=True, heads=8, kv_heads=4)
    second = ulysses(4, (8,), dense=True, heads=12, kv_heads=12)
    for case in (first, second, first):
        assert_right(pool, case)


def test_the_yardstick_sees_a_missing_key(pool):
    """The bound is tight enough that one key more or less does not pass."""
    case = ring(2, (64,), dense=True, causal=True)
    wrong = case.but(window_size=(62, 0))
    found = pool(2).run(answer, case)
    with pytest.raises(AssertionError, match="error"):
        judge(wrong, found)
