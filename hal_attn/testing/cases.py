"""The calls that the kit makes of every backend, batched and packed: what is claimed is right, the rest refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch

from hal_attn.testing.layouts import LAYOUTS
from hal_attn.testing.problem import (
    Base,
    Problem,
    batched,
    bool_mask,
    float_mask,
    padding,
    sinks,
    slopes,
    varlen,
)
from hal_attn.testing.tensors import randn


@dataclass(frozen=True)
class Case:
    """One kind of call.

    Attributes:
        name: short, and unlike that of any other case.
        feature, rule: of `FEATURES` and `RULES`; the rule is what a wrong answer breaks where nothing closer is found.
            The feature "dtype" is that of the dtype it is made in.
        make: its tensors and options for a dtype and head dim.
        full: only with effort "full".
        every_dtype: also with effort "quick" made in every dtype.
    """

    name: str
    feature: str
    rule: str
    make: Callable[[Base], Problem]
    full: bool = False
    every_dtype: bool = False


def _batched(name: str, feature: str, rule: str, *lengths: int, full: bool = False, **given: Any) -> Case:
    return Case(name, feature, rule, lambda base: batched(base, *lengths, **given), full)


Lengths = tuple[int, ...]


def _packed(
    name: str,
    feature: str,
    rule: str,
    lengths: Lengths = (37, 1, 20),
    lengths_k: Lengths | None = None,
    *,
    full: bool = False,
    **given: Any,
) -> Case:
    return Case(f"packed, {name}", feature, rule, lambda base: varlen(base, lengths, lengths_k, **given), full)


HEAD_DIMS = (16, 40, 64, 72, 128, 256)
MORE_HEAD_DIMS = (1, 2, 3, 8, 17, 20, 32, 65, 80, 96, 112, 120, 136, 160, 192, 320, 512)
LENGTHS = ((1, 65), (37, 1), (1, 1), (64, 64), (127, 129))
MORE_LENGTHS = ((2, 3), (15, 17), (31, 33), (65, 63), (128, 128), (129, 257), (3, 1025))
QUERIES, KEYS = (37, 1, 20, 64), (20, 8, 20, 70)
FLOAT32 = torch.float32


def cases() -> tuple[Case, ...]:
    """All of them."""
    return (*_shapes(), *_visibility(), *_masks(), *_options(), *_values(), *_layouts(), *_packed_cases(), *_pairs())


def _shapes() -> Iterator[Case]:
    yield Case("plain", "batched", "precision", batched, every_dtype=True)
    for full, lengths in ((False, LENGTHS), (True, MORE_LENGTHS)):
        for q, k in lengths:
            yield _batched(f"{q} queries, {k} keys", "lengths", "precision", q, k, full=full)
    yield _batched("no queries", "empty sequences", "blind rows", 0, 5)
    yield _batched("no keys", "empty sequences", "blind rows", 5, 0)
    for full, dims in ((False, HEAD_DIMS), (True, MORE_HEAD_DIMS)):
        for dim in dims:
            yield _batched(f"head dim {dim}", "head dims", "scale", head_dim=dim, full=full)
    for dim, value_dim in ((64, 32), (64, 128), (20, 12), (192, 128)):
        name = f"head dim {dim}, of value {value_dim}"
        yield _batched(name, "value head dim", "heads", head_dim=dim, value_head_dim=value_dim)
    yield _batched("2 key heads", "grouped heads", "heads", kv_heads=2)
    yield _batched("1 key head", "grouped heads", "heads", kv_heads=1, causal=True)
    yield _batched("6 heads, 3 key heads", "grouped heads", "heads", heads=6, kv_heads=3)
    yield _batched("5 heads", "batched", "heads", heads=5, full=True)
    for scale in (0.3, 0.05, 0.0, -0.3):
        yield _batched(f"scale {scale}", "scale", "scale", scale=scale)
        yield _batched(f"scale {scale}, causal", "scale", "scale", 37, 37, scale=scale, causal=True, full=scale > 0)


def _visibility() -> Iterator[Case]:
    rule = "visible keys"
    for q, k, full in ((64, 64, False), (37, 37, False), (200, 200, True)):
        yield _batched(f"causal, {q} of each", "causal", rule, q, k, causal=True, full=full)
    for q, k, full in ((37, 65, False), (65, 37, False), (2, 130, False), (130, 7, True), (127, 129, True)):
        name = f"causal, {q} queries, {k} keys"
        yield Case(
            name,
            "causal, unequal lengths",
            rule,
            lambda base, q=q, k=k: batched(base, q, k, causal=True),  # type: ignore[misc]
            full,
            every_dtype=q == 37,
        )
    windows = ((5, 3), (3, 0), (0, 0), (0, 2), (7, -1), (-1, 4), (None, 4))
    for q, k, full in ((37, 37, False), (37, 65, False), (65, 37, False), (130, 150, True)):
        for window in windows:
            name = f"window {window[0]}, {window[1]}; {q} queries, {k} keys"
            yield _batched(name, "window", rule, q, k, window_size=window, full=full or (q != k and window == (0, 2)))
    yield _batched("window and causal", "window", rule, 65, 65, window_size=(9, 9), causal=True)
    yield _batched("window that hides nothing", "batched", rule, window_size=(99, 99))
    yield _batched("window far from the start", "window", rule, 4, 700, window_size=(20, 0))


def _masks() -> Iterator[Case]:
    for name, broadcast in (("of all", ()), ("[1, 1, Sq, Sk]", (0, 1)), ("[B, 1, 1, Sk]", (1, 2)), ("[B, 1]", (1,))):
        yield _batched(f"bool mask {name}", "bool mask", "masks", mask=bool_mask(broadcast=broadcast))
        yield _batched(f"float mask {name}", "float mask", "bias", mask=float_mask(broadcast=broadcast))
    yield _batched("bool mask, blind rows", "bool mask", "blind rows", mask=bool_mask(blind=True))
    yield _batched("bool mask, causal", "bool mask", "visible keys", 37, 37, mask=bool_mask(), causal=True)
    yield _batched("float mask that hides", "float mask", "blind rows", mask=float_mask(hides=True))
    yield _batched("float mask in float32", "float mask", "bias", mask=float_mask(dtype=FLOAT32))
    yield _batched("float mask, causal", "float mask", "visible keys", 37, 37, mask=float_mask(), causal=True)
    yield _batched("float mask, scale", "float mask", "bias", mask=float_mask(), scale=0.3)
    yield _batched("bool mask, window", "window", "visible keys", mask=bool_mask(), window_size=(9, 3))
    feature = "causal, unequal lengths"
    yield _batched("bool mask, causal, 37 queries", feature, "visible keys", mask=bool_mask(), causal=True)
    yield _batched("padding, batch of 1", "key padding mask", "masks", batch=1, key_padding_mask=padding())
    for kind in ("end", "start", "holes", "all"):
        rule = "blind rows" if kind == "all" else "masks"
        yield _batched(f"padding, {kind}", "key padding mask", rule, key_padding_mask=padding(kind))
    yield _batched("padding, causal", "key padding mask", "masks", 37, 37, key_padding_mask=padding(), causal=True)
    yield _batched("padding, 2 key heads", "key padding mask", "masks", key_padding_mask=padding(), kv_heads=2)


def _options() -> Iterator[Case]:
    yield _batched("softcap", "softcap", "softcap", softcap=0.8)
    yield _batched("softcap, causal", "softcap", "softcap", 37, 37, softcap=0.8, causal=True)
    yield _batched("softcap, scale", "softcap", "softcap", softcap=1.5, scale=0.4)
    yield _batched("softcap, float mask", "softcap", "bias", softcap=0.8, mask=float_mask())
    yield _batched("sinks", "sinks", "sinks", sinks=sinks())
    yield _batched("large sinks", "sinks", "sinks", sinks=sinks(6.0), full=True)
    yield _batched("sinks, blind rows", "sinks", "blind rows", 65, 37, sinks=sinks(), causal=True)
    yield _batched("sinks, 2 key heads", "sinks", "sinks", sinks=sinks(), kv_heads=2)
    yield _batched("ALiBi", "ALiBi", "bias", alibi_slopes=slopes())
    yield _batched("ALiBi of each batch", "ALiBi", "bias", 65, 37, alibi_slopes=slopes(batch=True))
    yield _batched("ALiBi, causal", "ALiBi", "bias", 37, 37, alibi_slopes=slopes(), causal=True)


def _values() -> Iterator[Case]:
    yield Case("large logits", "large values", "precision", _large_logits)
    yield Case("large logits, causal", "large values", "precision", partial(_large_logits, causal=True))
    yield Case("many keys, values around 1", "dtype", "precision", _many_keys, every_dtype=True)
    yield Case("packed, many keys, values around 1", "dtype", "precision", _many_packed_keys, every_dtype=True)
    yield Case("large values", "large values", "precision", _large_values, full=True)


# In float64 the oracle's own sums round as much as those that it judges, so calls that round much are smaller there.


def _large_logits(base: Base, causal: bool = False) -> Problem:
    return batched(base, 37, 37, spread=2.0 if base.dtype == torch.float64 else 6.0, causal=causal)


def _large_values(base: Base) -> Problem:
    return _shifted(batched(base), 5.0 if base.dtype == torch.float64 else 50.0)


def _many_keys(base: Base) -> Problem:
    keys = 150 if base.dtype == torch.float64 else 1500
    return _shifted(batched(base, 5, keys, batch=1, heads=2), 1.0)


def _many_packed_keys(base: Base) -> Problem:
    keys = (90, 60) if base.dtype == torch.float64 else (900, 600)
    return _shifted(varlen(base, (5, 3), keys, heads=2), 1.0)


def _shifted(problem: Problem, by: float) -> Problem:
    return replace(problem, value=problem.value + by)


def _layouts() -> Iterator[Case]:
    for name, layout in LAYOUTS.items():
        yield Case(
            name,
            "strides",
            "layouts",
            lambda base, layout=layout: replace(batched(base, 37, 37), layout=layout),  # type: ignore[misc]
        )
        yield Case(
            f"packed, {name}",
            "strides",
            "layouts",
            lambda base, layout=layout: replace(varlen(base), layout=layout),  # type: ignore[misc]
        )
    yield _batched("mask of strides", "strides", "layouts", 37, 37, mask=_strided_mask)
    yield _batched("mask that is expanded", "strides", "layouts", 37, 37, mask=_expanded_mask)


def _strided_mask(scores: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    batch, heads, seqlen_q, seqlen_k = scores
    return (randn(batch, heads, seqlen_k, seqlen_q, seed=106) > 0.1).transpose(2, 3)


def _expanded_mask(scores: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    return (randn(1, 1, *scores[2:], seed=107) > 0.1).expand(scores)


def _packed_cases() -> Iterator[Case]:
    unequal = (QUERIES, KEYS)
    yield Case("packed, plain", "packed", "packed", varlen, every_dtype=True)
    yield _packed("equal sequences", "packed", "packed", (33,) * 3)
    yield _packed("one sequence", "packed", "packed", (40,))
    yield _packed("unequal lengths", "packed", "packed", *unequal)
    yield _packed("many short sequences", "packed", "packed", tuple(1 + n % 7 for n in range(40)), causal=True)
    yield _packed("far offsets", "packed", "packed", (64,) * 100, full=True, heads=2, causal=True)
    yield _packed("no keys in one", "empty sequences", "blind rows", (5, 3, 9), (5, 0, 9))
    yield _packed("no queries in one", "empty sequences", "blind rows", (5, 0, 9), (5, 3, 9), causal=True)
    yield _packed("empty first and last", "empty sequences", "blind rows", (0, 5, 9, 0), causal=True)
    yield _packed("all empty", "empty sequences", "blind rows", (0, 0))
    yield _packed("sinks, no keys in one", "empty sequences", "blind rows", (5, 3, 9), (5, 0, 9), sinks=sinks())
    yield _packed("causal", "causal", "visible keys", causal=True)
    yield _packed("causal, unequal lengths", "causal, unequal lengths", "visible keys", *unequal, causal=True)
    for window in ((5, 3), (3, 0), (6, -1), (-1, 4)):
        name = f"window {window[0]}, {window[1]}"
        yield _packed(name, "window", "visible keys", window_size=window)
        yield _packed(f"{name}, unequal lengths", "window", "visible keys", *unequal, window_size=window)
    for dim in (40, 64, 128):
        yield _packed(f"head dim {dim}", "head dims", "scale", head_dim=dim)
    yield _packed("head dim 64, of value 32", "value head dim", "heads", head_dim=64, value_head_dim=32)
    yield _packed("2 key heads", "grouped heads", "heads", *unequal, kv_heads=2)
    for scale in (0.3, 0.0, -0.3):
        yield _packed(f"scale {scale}", "scale", "scale", *unequal, scale=scale)
    yield _packed("softcap", "softcap", "softcap", softcap=0.8)
    yield _packed("sinks", "sinks", "sinks", *unequal, sinks=sinks())
    yield _packed("sinks, causal", "sinks", "sinks", *unequal, sinks=sinks(), causal=True)
    yield _packed("ALiBi", "ALiBi", "bias", alibi_slopes=slopes())
    yield _packed("ALiBi of each sequence", "ALiBi", "bias", *unequal, alibi_slopes=slopes(batch=True))
    yield _packed("large logits", "large values", "precision", spread=2.0)


TOGETHER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "scale": ("scale", "scale", {"scale": 0.3}),
    "causal": ("causal, unequal lengths", "visible keys", {"causal": True}),
    "window": ("window", "visible keys", {"window_size": (20, 3)}),
    "2 key heads": ("grouped heads", "heads", {"kv_heads": 2}),
    "value head dim": ("value head dim", "heads", {"head_dim": 64, "value_head_dim": 32}),
    "softcap": ("softcap", "softcap", {"softcap": 0.8}),
    "sinks": ("sinks", "sinks", {"sinks": sinks()}),
    "ALiBi": ("ALiBi", "bias", {"alibi_slopes": slopes()}),
    "bool mask": ("bool mask", "masks", {"mask": bool_mask()}),
    "padding": ("key padding mask", "masks", {"key_padding_mask": padding()}),
}


def _pairs() -> Iterator[Case]:
    """Every two of these arguments together, for effort "full"."""
    for first, second in combinations(TOGETHER, 2):
        feature, rule, other = TOGETHER[second]
        given = {**TOGETHER[first][2], **other}
        yield _batched(f"{first} and {second}", feature, rule, full=True, **given)
        if not {"mask", "key_padding_mask"} & given.keys():
            yield _packed(f"{first} and {second}", feature, rule, QUERIES, KEYS, full=True, **given)
