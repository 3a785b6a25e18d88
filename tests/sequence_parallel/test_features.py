"""Every feature in every mode: output, LSE and gradients of all ranks equal one process's, to 1e-5 in float32.

One test a feature, over the modes and over some situations; `coverage.py` makes the table of them.
"""

import pytest
import torch

from tests.sequence_parallel.case import Case, Degrees, assert_right

MODES = {
    "ulysses": [Degrees(ulysses=n) for n in (2, 3, 4)],
    "kv_gather": [Degrees(kv_gather=n) for n in (2, 3, 4)],
    "ring": [Degrees(ring=n) for n in (2, 3, 4)],
    "ulysses x ring": [Degrees(ulysses=2, ring=2)],
    "ulysses x kv_gather": [Degrees(ulysses=2, kv_gather=2)],
}
DEGREES = [degrees for of_mode in MODES.values() for degrees in of_mode]
MANY = (9, 1, 0, 17, 3, 6, 2)
MANY_K = (4, 7, 3, 0, 12, 6, 1)


def in_every_mode(**situations):
    """Parametrizes a test over the modes and over some situations, each the fields of a `Case`."""

    def mark(test):
        by_mode = pytest.mark.parametrize("degrees", DEGREES, ids=str)(test)
        return pytest.mark.parametrize("fields", situations.values(), ids=situations.keys())(by_mode)

    return mark


def check(pool, degrees, fields):
    return assert_right(pool, Case(degrees, **{"lengths": MANY, "seed": 1, **fields}))


@in_every_mode(
    odd={"lengths": (7, 7), "dense": True},
    prime={"lengths": (13,)},
    shorter_than_the_ranks={"lengths": (1,)},
    one_token_in_a_batch={"lengths": (1, 1, 1), "dense": True, "causal": True},
    no_tokens={"lengths": (0, 0), "dense": True},
    no_sequences={"lengths": ()},
    no_keys={"lengths": (5, 5), "lengths_k": (0, 0), "dense": True},
)
def test_any_length(pool, degrees, fields):
    check(pool, degrees, fields)


@in_every_mode(
    self_attention={},
    causal={"causal": True},
    cross_attention={"lengths_k": MANY_K},
    cross_attention_causal={"lengths_k": MANY_K, "causal": True},
    many_of_one_token={"lengths": (1,) * 9, "causal": True},
    whole={"lengths": (12,) * 4 + (7,) * 12, "causal": True},
    some_whole={"lengths": (12, 12, 12, 12, 9, 5, 5), "causal": True},
    all_empty={"lengths": (0, 0, 0)},
)
def test_packed_sequences(pool, degrees, fields):
    check(pool, degrees, fields)


@in_every_mode(
    causal={"lengths": (21,), "causal": True},
    causal_contiguous={"lengths": (21,), "causal": True, "layout": "contiguous"},
    causal_zigzag={"lengths": (22, 22), "causal": True, "layout": "zigzag", "dense": True},
    more_keys_than_queries={"lengths": (6, 6), "lengths_k": (15, 15), "causal": True, "dense": True},
    fewer_keys_than_queries={"lengths": (15,), "lengths_k": (6,), "causal": True, "layout": "zigzag"},
    window={"lengths": (25, 3), "window_size": (4, 2)},
    window_zigzag={"lengths": (25, 3), "window_size": (4, 2), "layout": "zigzag"},
    causal_window={"lengths": (25, 11), "causal": True, "window_size": (5, -1)},
    causal_window_zigzag={"lengths": (25, 11), "causal": True, "window_size": (5, 3), "layout": "zigzag"},
    window_of_another_length={"lengths": (8,), "lengths_k": (19,), "window_size": (3, 1)},
    only_what_is_ahead={"lengths": (17,), "window_size": (0, None)},
)
def test_causal_and_windows(pool, degrees, fields):
    check(pool, degrees, fields)


DENSE = {"lengths": (11, 11), "dense": True}
WHOLE = (True, True, True, True)


@in_every_mode(
    padding=DENSE | {"padding": True},
    padding_causal_zigzag=DENSE | {"padding": True, "causal": True, "layout": "zigzag"},
    padding_sharded=DENSE | {"padding": True, "masks": "sharded"},
    bool_per_head=DENSE | {"mask": ("bool", WHOLE)},
    bool_for_all=DENSE | {"mask": ("bool", (False, False, True, True)), "causal": True},
    bool_sharded=DENSE | {"mask": ("bool", WHOLE), "masks": "sharded", "layout": "zigzag"},
    float_per_head=DENSE | {"mask": ("float", WHOLE), "window_size": (4, 2)},
    float_of_keys=DENSE | {"mask": ("float", (True, False, False, True)), "masks": "sharded"},
    float_sharded_few_rows={
        "lengths": (3, 3),
        "lengths_k": (9, 9),
        "dense": True,
        "mask": ("float", (True, False, True, False)),
        "masks": "sharded",
    },
    all_three=DENSE | {"lengths_k": (14, 14), "mask": ("float", WHOLE), "padding": True, "causal": True},
    replicated=DENSE | {"mask": ("bool", WHOLE), "padding": True, "prefix": 2, "suffix": 1, "masks": "sharded"},
)
def test_masks(pool, degrees, fields):
    check(pool, degrees, fields)


EACH = {"prefix": (2, 0, 0, 3, 1, 0, 1), "suffix": (1, 1, 0, 2, 2, 0, 1), "key_prefix": (0, 3, 2, 1, 0, 5, 0)}


@in_every_mode(
    prefix={"lengths": (13, 13), "dense": True, "prefix": 3},
    prefix_and_suffix={"lengths": (13, 13), "dense": True, "prefix": 3, "suffix": 2},
    key_prefix={"lengths": (13, 13), "dense": True, "key_prefix": 3},
    all_causal={"lengths": (13,), "prefix": 3, "suffix": 2, "key_prefix": 2, "causal": True},
    all_with_window={"lengths": (19,), "prefix": 3, "suffix": 2, "key_prefix": 2, "window_size": (4, 2)},
    nothing_else={"lengths": (5, 3), "prefix": (3, 3), "suffix": (2, 0)},
    each_its_own=EACH,
    each_its_own_causal=EACH | {"causal": True, "layout": "zigzag"},
    each_its_own_cross=EACH | {"lengths_k": (9, 4, 2, 13, 5, 8, 2), "sinks": True},
)
def test_replicated_tokens(pool, degrees, fields):
    check(pool, degrees, fields)


@in_every_mode(
    grouped={"heads": 12, "kv_heads": 4},
    one_key_head={"heads": 8, "kv_heads": 1, "causal": True},
    fewer_key_heads_than_ranks={"heads": 6, "kv_heads": 2},
    query_heads_that_do_not_divide={"heads": 7, "kv_heads": 7},
    key_heads_that_do_not_divide={"heads": 10, "kv_heads": 5, "causal": True},
    groups_cut_in_the_middle={"heads": 10, "kv_heads": 2},
    fewer_heads_than_ranks={"heads": 1, "kv_heads": 1},
    fewer_heads_than_ranks_replicated={"heads": 2, "kv_heads": 1, "prefix": (2, 1, 0, 3, 1, 0, 1), "sinks": True},
)
def test_heads(pool, degrees, fields):
    check(pool, degrees, fields)


@in_every_mode(
    value_head_dim={"head_dim": 16, "value_head_dim": 5},
    wider_values={"head_dim": 4, "value_head_dim": 24, "causal": True},
    softcap={"softcap": 1.5, "causal": True},
    softcap_masked=DENSE | {"softcap": 1.5, "mask": ("bool", WHOLE)},
    sinks={"sinks": True, "causal": True},
    sinks_replicated={"sinks": True, "prefix": (2, 0, 0, 3, 1, 0, 1), "suffix": (1, 1, 0, 2, 2, 0, 1)},
    sinks_without_keys={"sinks": True, "lengths_k": (0,) * len(MANY)},
    scale={"scale": 0.3, "lse_weight": True},
    scale_of_nothing={"scale": 0.0},
    everything={"softcap": 2.0, "sinks": True, "value_head_dim": 5, "scale": 0.4, "causal": True, "lse_weight": True},
    bfloat16={"dtype": torch.bfloat16, "causal": True},
    bfloat16_sinks={"dtype": torch.bfloat16, "sinks": True, "layout": "zigzag"},
)
def test_values_sinks_softcap_lse(pool, degrees, fields):
    check(pool, degrees, fields)


@in_every_mode(
    packed_causal={"causal": True},
    zigzag_window={"window_size": (3, 1), "layout": "zigzag"},
    replicated=EACH,
    grouped_heads={"heads": 6, "kv_heads": 2, "causal": True},
    empty_shares={"lengths": (2, 0, 1), "lengths_k": (1, 3, 0)},
    some_whole={"lengths": (12, 12, 12, 12, 9, 5, 5), "prefix": (2, 1, 0, 3, 1, 0, 1), "causal": True},
    through_the_lse=EACH | {"lse_weight": True, "causal": True, "sinks": True},
    masked=DENSE | {"mask": ("float", WHOLE), "padding": True, "lse_weight": True, "prefix": 1},
)
def test_gradients(pool, degrees, fields):
    errors = check(pool, degrees, fields)
    assert 0 < errors.gradient <= 1e-5
