"""Calls by name, in any size: tensors, and options made for them."""

from __future__ import annotations

import torch

from hal_attn import PackedSequences
from tests.support import dense, randn


def hiding(size, *, dtype=None):
    """A mask that hides some pairs, and all of one query."""
    visible = randn(2, 1, size, size, seed=size) > -0.5
    visible[1, 0, 0] = False
    if dtype is None:
        return visible
    return randn(2, 4, size, size, seed=size + 1).masked_fill(~visible, -torch.inf).to(dtype)


def padding(size):
    """Key padding of two sequences, the second shorter."""
    return torch.arange(size) < torch.tensor([[size], [size - 2]])


# Of each: the shape beside the length, the options, and the options that are tensors, made for a length.
BATCHED = {
    "plain": ({}, {}, {}),
    "causal": ({}, {"causal": True}, {}),
    "causal, more keys": ({"more_keys": 3}, {"causal": True}, {}),
    "causal, more queries": ({"more_keys": -2}, {"causal": True}, {}),
    "window": ({}, {"window_size": (3, 1)}, {}),
    "left window, as None": ({}, {"window_size": [2, None]}, {}),
    "scale": ({}, {"scale": 0.3}, {}),
    "scale 0": ({}, {"scale": 0.0}, {}),
    "softcap": ({}, {"softcap": 2.0, "causal": True}, {}),
    "grouped heads": ({"kv_heads": 2}, {"causal": True}, {}),
    "value head dim": ({"value_head_dim": 24}, {}, {}),
    "LSE": ({}, {"return_lse": True, "causal": True}, {}),
    "deterministic": ({}, {"deterministic": True}, {}),
    "mask": ({}, {}, {"mask": hiding}),
    "float mask": ({}, {"causal": True}, {"mask": lambda size: hiding(size, dtype=torch.float32)}),
    "key padding": ({}, {}, {"key_padding_mask": padding}),
    "sinks": ({}, {"return_lse": True}, {"sinks": lambda size: randn(4, seed=3)}),
    "slopes": ({}, {"causal": True}, {"alibi_slopes": lambda size: randn(2, 4, seed=4).abs()}),
    "everything": (
        {"kv_heads": 2, "value_head_dim": 8},
        {"causal": True, "window_size": (5, 0), "softcap": 3.0, "scale": 0.2, "return_lse": True},
        {
            "mask": hiding,
            "key_padding_mask": padding,
            "sinks": lambda size: randn(4, seed=3),
            "alibi_slopes": lambda size: randn(4, seed=4).abs(),
        },
    ),
}
PACKED = {
    "plain": ({}, {}, {}),
    "causal": ({"kv_heads": 2}, {"causal": True}, {}),
    "window": ({}, {"window_size": (2, 1)}, {}),
    "LSE": ({}, {"return_lse": True, "causal": True}, {}),
    "sinks": ({}, {"return_lse": True}, {"sinks": lambda size: randn(4, seed=3)}),
    "slopes": ({}, {"causal": True, "softcap": 2.0}, {"alibi_slopes": lambda size: randn(4, seed=4).abs()}),
}
# One sequence has no queries and no keys; then there are no keys, or no queries.
LENGTHS = ([3, 5], [1, 7, 4], [6], [2, 0, 3, 1], [4, 4, 4, 4, 4])
LENGTHS_K = ([4, 5], [1, 2, 9], [3], [5, 1, 0, 1], [1, 2, 3, 4, 5])


def batched(name, size=7, dtype=torch.float32):
    """(query, key, value), options and option tensors of a batched call with `size` queries."""
    shape, options, tensors = BATCHED[name]
    shape = dict(shape)
    keys = size + shape.pop("more_keys", 0)
    made = dense(2, size, keys, dtype=dtype, seed=size, **shape)
    return made, options, {key: make(size) for key, make in tensors.items()}


def packed(name, lengths, lengths_k=None, dtype=torch.float32):
    """(query, key, value), sequences, options and option tensors of a packed call."""
    shape, options, tensors = PACKED[name]
    tokens_k = sum(lengths if lengths_k is None else lengths_k)
    made = tuple(t[0] for t in dense(1, sum(lengths), tokens_k, dtype=dtype, seed=sum(lengths), **shape))
    sequences = PackedSequences.from_lengths(lengths, lengths_k)
    return made, sequences, options, {key: make(sum(lengths)) for key, make in tensors.items()}
