"""Random cases for a number of ranks: every mode, any lengths, and all options that mean something together."""

import hypothesis.strategies as st
import torch

from tests.sequence_parallel.case import Case, Degrees


def all_degrees(world):
    """Every way to share `world` ranks between heads and keys."""
    found = []
    for ulysses in range(1, world + 1):
        if world % ulysses == 0:
            rest = world // ulysses
            found += {Degrees(ulysses, rest, 1): None, Degrees(ulysses, 1, rest): None}
    return found


@st.composite
def cases(draw, world, dtypes=(torch.float32, torch.float32, torch.float32, torch.bfloat16)):
    dense = draw(st.sampled_from([False, False, True]))
    count, longest = draw(st.sampled_from([1, 2, 3, 4, 4, 7])), draw(st.sampled_from([14, 14, 40]))
    lengths = draw(st.lists(st.integers(0, longest), min_size=1 if dense else count, max_size=1 if dense else count))
    alone = draw(st.sampled_from([False, False, True]))
    ends = [(0, 0) if alone else draw(replicated(length)) for length in lengths]
    firsts = draw(st.sampled_from([[0] * len(lengths), None])) or [draw(st.integers(0, 3)) for _ in lengths]
    lengths_k = [length + first for length, first in zip(lengths, firsts, strict=True)]
    if draw(st.sampled_from([False, False, True])):
        least = [first + sum(both) for first, both in zip(firsts, ends, strict=True)]
        lengths_k = [low + draw(st.integers(0, 12)) for low in least]
    repeat = count if dense else 1
    kv_heads, head_dim = draw(st.integers(1, 5)), draw(st.sampled_from([4, 8, 16]))
    edge = st.one_of(st.just(-1), st.integers(0, 8))
    kept = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())
    return Case(
        degrees=draw(st.sampled_from(all_degrees(world))),
        lengths=tuple(lengths) * repeat,
        lengths_k=tuple(lengths_k) * repeat,
        dense=dense,
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=head_dim,
        value_head_dim=draw(st.sampled_from([head_dim, 5, 24])),
        dtype=draw(st.sampled_from(dtypes)),
        causal=draw(st.booleans()),
        window_size=draw(st.one_of(st.none(), st.none(), st.tuples(edge, edge))),
        layout=draw(st.sampled_from(["auto", "auto", "contiguous", "zigzag"])),
        prefix=tuple(before for before, _ in ends) * repeat,
        suffix=tuple(after for _, after in ends) * repeat,
        key_prefix=tuple(firsts) * repeat,
        mask=draw(st.one_of(st.none(), st.tuples(st.sampled_from(["bool", "float"]), kept))) if dense else None,
        padding=dense and draw(st.booleans()),
        masks=draw(st.sampled_from(["whole", "sharded"])),
        sinks=draw(st.sampled_from([False, False, True])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        scale=draw(st.sampled_from([None, None, 0.3])),
        lse_weight=draw(st.sampled_from([False, False, True])),
        seed=draw(st.integers(0, 2**20)),
    )


@st.composite
def replicated(draw, length):
    """How many tokens of a sequence are replicated at its front and at its end."""
    if draw(st.booleans()):
        return 0, 0
    before = draw(st.integers(0, min(length, 3)))
    return before, draw(st.integers(0, min(length - before, 2)))
