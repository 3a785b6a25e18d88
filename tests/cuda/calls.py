"""The calls that these tests make: tensors and options by name."""

import torch

from tests.support import dense, packed, randn

HALF = torch.bfloat16


def mask(*, blind=False):
    """Bool `[2, 1, 7, 11]`; with `blind`, one query sees no key."""
    visible = randn(2, 1, 7, 11, seed=7) > -0.3
    visible[..., 0] = True
    if blind:
        visible[1, 0, 3] = False
    return visible


def padding():
    """Bool `[2, 11]`: the second sequence has eight keys."""
    return torch.arange(11) < torch.tensor([[11], [8]])


def batched(seqlen_q, seqlen_k, **options):
    shape = {name: options.pop(name) for name in ("kv_heads", "head_dim", "value_head_dim", "dtype") if name in options}
    return (*dense(2, seqlen_q, seqlen_k, **{"dtype": HALF, **shape}),), options


def sequences(lengths, lengths_k=None, **options):
    shape = {name: options.pop(name) for name in ("kv_heads", "head_dim", "value_head_dim", "dtype") if name in options}
    *tensors, packing = packed(lengths, lengths_k, **{"dtype": HALF, **shape})
    return tuple(tensors), {"sequences": packing, **options}


def bias():
    return randn(2, 4, 7, 11, seed=5, dtype=HALF)


SINKS = randn(4, seed=11)
SLOPES = randn(4, seed=12).abs() / 4
CALLS = {
    "plain": lambda: batched(7, 11),
    "one query": lambda: batched(1, 11, kv_heads=2),
    "one key": lambda: batched(7, 1),
    "float16": lambda: batched(7, 11, dtype=torch.float16),
    "float32": lambda: batched(7, 11, dtype=torch.float32),
    "scale": lambda: batched(7, 11, scale=0.3),
    "grouped heads": lambda: batched(7, 11, kv_heads=2),
    "odd head dims": lambda: batched(7, 11, head_dim=20, value_head_dim=12),
    "wide value": lambda: batched(7, 7, head_dim=20, value_head_dim=33, causal=True),
    "causal": lambda: batched(11, 11, causal=True),
    "causal, more keys": lambda: batched(7, 11, causal=True, kv_heads=2),
    "causal, blind rows": lambda: batched(11, 7, causal=True, kv_heads=2),
    "window": lambda: batched(7, 11, window_size=(3, 1)),
    "causal window": lambda: batched(7, 11, window_size=(3, 0)),
    "blind window": lambda: batched(11, 5, window_size=(2, 1)),
    "softcap": lambda: batched(7, 11, softcap=3.0, causal=True),
    "sinks": lambda: batched(7, 11, sinks=SINKS),
    "sinks, blind rows": lambda: batched(11, 7, sinks=SINKS, causal=True),
    "alibi": lambda: batched(7, 11, alibi_slopes=SLOPES),
    "mask": lambda: batched(7, 11, mask=mask(), kv_heads=2),
    "mask, blind rows": lambda: batched(7, 11, mask=mask(blind=True)),
    "float mask": lambda: batched(7, 11, mask=bias()),
    "mask, causal window": lambda: batched(7, 11, mask=mask(), causal=True, window_size=(4, 0)),
    "padding": lambda: batched(7, 11, key_padding_mask=padding(), head_dim=20),
    "padding, float32, causal": lambda: batched(11, 11, key_padding_mask=padding(), dtype=torch.float32, causal=True),
    "packed": lambda: sequences([3, 9, 1, 4], kv_heads=2),
    "packed, alike": lambda: sequences((5, 5, 5), kv_heads=2),
    "packed, one": lambda: sequences((5,), causal=True),
    "packed, causal": lambda: sequences([3, 9, 1, 4], causal=True, head_dim=20),
    "packed, unequal": lambda: sequences([3, 9, 0, 4], [5, 3, 4, 0]),
    "packed, blind rows": lambda: sequences([3, 9, 0, 4], [5, 3, 4, 0], causal=True, kv_heads=2),
    "packed, window": lambda: sequences([3, 9, 4], [5, 3, 8], window_size=(2, 1)),
    "packed, causal window": lambda: sequences([13, 9, 4], window_size=(2, 0)),
    "packed, softcap": lambda: sequences([3, 9, 4], softcap=2.0),
    "packed, sinks": lambda: sequences([3, 9, 4], [5, 3, 8], causal=True, sinks=SINKS),
    "packed, alibi": lambda: sequences([3, 9, 4], [5, 3, 8], alibi_slopes=SLOPES.expand(3, 4)),
    "packed, float32": lambda: sequences([3, 9, 4], dtype=torch.float32, causal=True),
}
