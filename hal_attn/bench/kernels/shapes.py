"""The shapes that are measured: ten by default, or others by flag."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from hal_attn.bench.problem import Problem
from hal_attn.errors import InvalidAttentionInputError

_HALVES = tuple(16384 >> step for step in range(10))
# (sequences, packed, query heads, key heads, head dim, causal)
_DEFAULT: tuple[tuple[Sequence[int], bool, int, int, int, bool], ...] = (
    ([1024] * 16, False, 16, 16, 128, True),
    ([4096] * 4, False, 16, 16, 128, True),
    ([16384], False, 16, 16, 128, True),
    ([16384], False, 16, 16, 128, False),
    ([4096] * 4, False, 32, 8, 128, True),
    ([4096] * 4, False, 32, 32, 64, False),
    ([8192] * 2, False, 16, 16, 64, True),
    (_HALVES, True, 16, 16, 128, False),
    (_HALVES, True, 32, 8, 128, True),
    ([1500] * 20, True, 16, 16, 64, False),
)
_LENGTHS_DOWN, _HEADS_DOWN, _BATCH_DOWN = 8, 4, 4
SCALED = (
    f"shapes scaled down for the CPU: lengths by {_LENGTHS_DOWN}, heads by {_HEADS_DOWN}, batches by {_BATCH_DOWN}; "
    "--full-size takes those of accelerators"
)
_QUICK_TOKENS = 256


def default_problems(dtype: torch.dtype, scaled: bool) -> list[Problem]:
    """Seven batched shapes and three packed ones; `scaled` for a CPU."""
    found = [
        Problem(tuple(lengths), packed, heads, kv_heads, head_dim, dtype, causal)
        for lengths, packed, heads, kv_heads, head_dim, causal in _DEFAULT
    ]
    return [_scaled(problem) for problem in found] if scaled else found


def quick_problems(dtype: torch.dtype) -> list[Problem]:
    """A batched and a packed one that any machine does in a moment."""
    causal = [problem for problem in default_problems(dtype, scaled=True) if problem.causal]
    wanted = (next(problem for problem in causal if problem.packed is packed) for packed in (False, True))
    return [_cut(replace(problem, heads=4, kv_heads=2, head_dim=64)) for problem in wanted]


def _scaled(problem: Problem) -> Problem:
    lengths = tuple(max(1, length // _LENGTHS_DOWN) for length in problem.lengths)
    if not problem.packed:
        lengths = lengths[: max(1, len(lengths) // _BATCH_DOWN)]
    heads, kv_heads = problem.heads // _HEADS_DOWN, problem.kv_heads // _HEADS_DOWN
    return replace(problem, lengths=lengths, heads=heads, kv_heads=kv_heads)


def _cut(problem: Problem) -> Problem:
    return replace(problem, lengths=tuple(min(length, _QUICK_TOKENS) for length in problem.lengths))


def short(problem: Problem) -> str:
    """A problem in few words, unique among those of one dtype: `B4 S4096 H32/8 D128 causal`."""
    heads = f"H{problem.heads}" + ("" if problem.heads == problem.kv_heads else f"/{problem.kv_heads}")
    band = "causal" if problem.causal else "full"
    if not problem.packed:
        return f"B{len(problem.lengths)} S{problem.lengths[0]} {heads} D{problem.head_dim} {band}"
    longest, shortest = max(problem.lengths), min(problem.lengths)
    lengths = f"{len(problem.lengths)} x {longest}" if longest == shortest else f"{longest}..{shortest}"
    count = "" if longest == shortest else f", {len(problem.lengths)} seq."
    return f"packed {lengths}{count} {heads} D{problem.head_dim} {band}"


def parse_shape(text: str, dtype: torch.dtype) -> Problem:
    """A dense batch as in `B=4,S=4096,H=32/8,D=128,causal`; B is 1 and it is not causal where it does not say.

    Raises:
        InvalidAttentionInputError: it is none.
    """
    values, words = _parts(text.split(","))
    missing = {"S", "H", "D"} - values.keys()
    if missing or values.keys() - set("BSHD") or words - {"causal", "full"}:
        raise _wrong("--shape", text, "B=4,S=4096,H=32/8,D=128,causal, with S, H and D at least")
    numbers = {name: _number("--shape", text, values.get(name, "1")) for name in "BSD"}
    heads, kv_heads = _heads("--shape", text, values["H"])
    return Problem((numbers["S"],) * numbers["B"], False, heads, kv_heads, numbers["D"], dtype, "causal" in words)


def parse_packed(text: str, dtype: torch.dtype) -> Problem:
    """Packed sequences as in `16384,8192,20x1500,H=32/8,D=128,causal`; H is 16, D is 128, and it is not causal where it
    does not say.

    Raises:
        InvalidAttentionInputError: it is none.
    """
    parts = [part.strip() for part in text.split(",")]
    counted = [re.fullmatch(r"(?:(\d+)x)?(\d+)", part) for part in parts]
    lengths = [int(found[2]) for found in counted if found for _ in range(int(found[1] or 1))]
    values, words = _parts(part for part, found in zip(parts, counted, strict=True) if not found)
    if not lengths or min(lengths) < 1 or values.keys() - set("HD") or words - {"causal", "full"}:
        raise _wrong("--packed", text, "lengths of at least 1 and options, as in 16384,20x1500,H=32/8,D=128,causal")
    heads, kv_heads = _heads("--packed", text, values.get("H", "16"))
    head_dim = _number("--packed", text, values.get("D", "128"))
    return Problem(tuple(lengths), True, heads, kv_heads, head_dim, dtype, "causal" in words)


def _parts(parts: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """`NAME=value` by name, and the words without a value."""
    split = [part.strip().partition("=") for part in parts]
    return {n.upper(): v for n, equals, v in split if equals}, {n.lower() for n, equals, _ in split if not equals}


def _heads(flag: str, text: str, value: str) -> tuple[int, int]:
    heads, _, kv_heads = value.partition("/")
    numbers = _number(flag, text, heads), _number(flag, text, kv_heads or heads)
    if numbers[0] % numbers[1]:
        raise _wrong(flag, text, "key heads that divide the query heads, as in H=32/8")
    return numbers


def _number(flag: str, text: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise _wrong(flag, text, "whole numbers of at least 1")
    return int(value)


def _wrong(flag: str, text: str, allowed: str) -> InvalidAttentionInputError:
    return InvalidAttentionInputError(flag, repr(text), allowed)
