"""Which tests stand for which promise: the table of features by modes, and the numbered features.

`python -m tests.sequence_parallel.coverage` prints the table as Markdown. A name may be the beginning of a test's name:
`test_features.py::test_masks[ring` means the test in every situation at 2, 3 and 4 ranks.
"""

COLUMNS = ("Ulysses", "KV gather", "ring", "Ulysses x ring", "Ulysses x KV gather")
_IDS = ("ulysses{}-", "kv_gather{}-", "ring{}-", "ulysses2_ring2-", "ulysses2_kv_gather2-")
_ROWS = {
    "any length, any rank count": "test_any_length",
    "many packed sequences, self and cross": "test_packed_sequences",
    "causal, window, zigzag": "test_causal_and_windows",
    "masks: key padding, bool, float, per head": "test_masks",
    "replicated tokens, key-only prefix": "test_replicated_tokens",
    "grouped heads, few heads, heads that do not divide": "test_heads",
    "Dv != D, softcap, sinks, LSE": "test_values_sinks_softcap_lse",
    "gradients": "test_gradients",
}


def _names(test, pattern):
    ranks = (2, 3, 4) if "{}" in pattern else ("",)
    return tuple(f"test_features.py::{test}[{pattern.format(n)}" for n in ranks)


TABLE = {
    (row, column): _names(test, pattern)
    for row, test in _ROWS.items()
    for column, pattern in zip(COLUMNS, _IDS, strict=True)
}

FEATURES = {
    "1 packed sequences": (
        "test_features.py::test_packed_sequences",
        "test_random.py::test_random_cases",
        "test_whole.py::test_nothing_of_them_travels",
    ),
    "2 causal and window, contiguous and zigzag": (
        "test_features.py::test_causal_and_windows",
        "test_schedule.py::test_each_visible_pair_is_computed_once",
        "test_schedule.py::test_zigzag_balances_causal_work",
    ),
    "3 masks, whole and sharded": (
        "test_features.py::test_masks",
        "test_bad_input.py::test_a_wrong_mask",
    ),
    "4 replicated prefix, suffix, key prefix": (
        "test_features.py::test_replicated_tokens",
        "test_sharding.py::test_replicated_rows_are_on_every_rank_and_own_rows_on_one",
    ),
    "5 key heads only where needed, heads that do not divide": (
        "test_features.py::test_heads",
        "test_bytes.py::test_a_key_head_goes_only_where_a_query_head_reads_it",
    ),
    "6 Dv, softcap, sinks, LSE, bfloat16": (
        "test_features.py::test_values_sinks_softcap_lse",
        "test_precision.py::test_errors_do_not_grow_with_the_ranks",
    ),
    "7 gradients": ("test_features.py::test_gradients",),
    "8 overlap": (
        "test_overlap.py::test_the_next_keys_travel_while_these_are_computed",
        "test_overlap.py::test_the_next_heads_travel_while_these_are_computed",
        "test_overlap.py::test_the_gather_travels_while_own_keys_are_computed",
        "test_hardware.py::test_a_layer_never_waits_for_the_device",
    ),
    "9 agreement": (
        "test_agreement.py::test_plans_that_differ",
        "test_agreement.py::test_calls_that_differ",
        "test_agreement.py::test_one_rank_is_wrong",
        "test_agreement.py::test_a_rank_that_dies",
    ),
    "10 shard, gather, positions, report": (
        "test_sharding.py::test_gather_is_the_inverse_of_shard",
        "test_sharding.py::test_positions",
        "test_sharding.py::test_the_gradient_of_gather",
        "test_report.py::test_the_report_says_what_the_plan_does",
        "test_report.py::test_the_layout_and_its_reason",
    ),
    "11 simulated vendors": (
        "test_simulated.py::test_one_sided_sequences_never_reach_the_kernel",
        "test_simulated.py::test_modes_over_simulated_vendors",
    ),
}


def rows():
    """The table, its head first: each feature, and its tests in each mode."""
    yield ("", *COLUMNS)
    for row, test in _ROWS.items():
        yield (row, *(f"`{test}[{pattern.replace('{}', '*')}*]`" for pattern in _IDS))


def main():
    from tests.docs_tables import table

    print(table(*rows()), end="")


if __name__ == "__main__":
    main()
