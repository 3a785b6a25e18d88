"""Each argument of each backend: honoured (its value reaches the output, rightly) or refused (by its name).

`python -m tests.arguments` prints the tables; `test_arguments` makes every cell a test.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from dataclasses import is_dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hal_attn import PackedSequences, explain, select_backend
from tests.support import assert_close_to_oracle, call, dense, expected, randn

# One device a vendor; the others differ in what they refuse, not in what an argument means.
PLATFORMS = ("cpu", "cuda:sm90", "rocm:gfx942", "ascend:Ascend910B1", "ascend:Ascend310P3")
LENGTHS = (5, 8, 3)
HEADS, KV_HEADS, DIM = 4, 2, 64
# What a refusal of an argument may be called; a mask is refused by its kind or by its dtype.
RULES = {"dropout_p": ("dropout_p", "dropout"), "gradients": ("gradients", "dtype"), "grouped heads": ("heads",)}
# Backends whose vendor is told by `deterministic`; the others refuse it, or repeat anyway, as fa3-fwd's operator does,
# which is always told to make one split (`tests/cuda/test_libraries.py` has the package with the flag).
TOLD_DETERMINISTIC = ("flash_attn", "flash_attn_4", "aiter", "aiter_triton")
# Not a half, where the share that is dropped is the share that is kept.
DROPPED = 0.2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def simulating(platform):
    """Within it, calls on CPU tensors are that platform's, and empty sequences are answered; "cpu" is the real one."""
    simulated = {"HAL_ATTN_SIMULATE": platform, "HAL_ATTN_EMPTY_SEQUENCES": "compact"}
    return mock.patch.dict(os.environ, {} if platform == "cpu" else simulated)


def inputs(packed, dtype, **shape):
    """Query, key, value and the offsets of a plain call."""
    sizes = {"heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "dtype": dtype, "seed": 7} | shape
    if not packed:
        return dense(2, 8, **sizes), {}
    query, key, value = (tensor[0] for tensor in dense(1, sum(LENGTHS), **sizes))
    return (query, key, value), {"sequences": PackedSequences.from_lengths(LENGTHS)}


def arguments(packed, dtype):
    """By argument: what is changed in the plain call."""
    batch = len(LENGTHS) if packed else 2
    mask = randn(2, HEADS, 8, 8, seed=1) < 0.6
    mask[..., 0] = True
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[1, 5:] = False
    every = {
        "scale": {"scale": 0.3},
        "causal": {"causal": True},
        "window_size": {"window_size": (2, 1)},
        "mask (bool)": {"mask": mask},
        "mask (float)": {"mask": randn(2, HEADS, 8, 8, seed=2, dtype=dtype)},
        "key_padding_mask": {"key_padding_mask": padding},
        "softcap": {"softcap": 0.8},
        "sinks": {"sinks": randn(HEADS, seed=3)},
        "alibi_slopes": {"alibi_slopes": randn(batch, HEADS, seed=4).abs() * 0.3},
        "dropout_p": {"dropout_p": DROPPED},
        "deterministic": {"deterministic": True},
        "return_lse": {"return_lse": True},
        "gradients": {},
        "grouped heads": {},
    }
    return {name: given for name, given in every.items() if not (packed and "mask" in name)}


def verdict(backend, packed, argument):
    """ "honoured", or "refused: " and the rule; AssertionError where the argument is neither."""
    call_of = plain_call(backend, packed)
    if call_of is None:
        return "-"
    tensors, offsets = call_of
    dtype = tensors[0].dtype
    given = arguments(packed, dtype)[argument]
    if argument == "grouped heads":
        tensors, _ = inputs(packed, dtype, kv_heads=KV_HEADS)
    if argument == "gradients":
        tensors = tuple(tensor.requires_grad_() for tensor in tensors)
    refusals = _refusals(backend, tensors, offsets | given)
    if refusals:
        rule = argument.partition(" (")[0]
        named = [refusal for refusal in refusals if refusal.rule in RULES.get(argument, (rule,))]
        assert named, f"{backend} refuses {argument} by another name: {[str(r) for r in refusals]}"
        return f"refused: {named[0]}"
    _honours(backend, argument, tensors, offsets, given)
    return "honoured"


def _refusals(backend, tensors, options):
    candidate = next(c for c in explain(*tensors, **options).considered if c.backend.name == backend)
    return candidate.refusals


def _honours(backend, argument, tensors, offsets, given):
    if argument == "deterministic":
        _honours_deterministic(backend, tensors, offsets)
        return
    if argument == "dropout_p":
        _honours_dropout(backend, "sequences" in offsets, tensors[0].dtype)
        return
    plain = call(*(t.detach() for t in inputs("sequences" in offsets, tensors[0].dtype)[0]), backend=backend, **offsets)
    result = call(*tensors, backend=backend, **offsets, **given)
    output, lse = result if argument == "return_lse" else (result, None)
    if argument not in ("return_lse", "gradients"):
        assert not torch.equal(output, plain), f"{argument} changes nothing"
    options = {name: value for name, value in given.items() if name != "return_lse"}
    right = expected(*(tensor.detach() for tensor in tensors), **offsets, **options)
    assert_close_to_oracle(output, right.output, right.plain_output, f"{backend}: {argument}")
    if lse is not None:
        assert_close_to_oracle(lse, right.lse, right.plain_lse, f"{backend}: LSE")
    if argument == "gradients":
        found = torch.autograd.grad((output * right.weight).sum(), tensors)
        largest = max(gradient.abs().max().item() for gradient in right.gradients)
        for have, exact, simple in zip(found, right.gradients, right.plain_gradients, strict=True):
            assert_close_to_oracle(have, exact, simple, f"{backend}: gradient", largest_gradient=largest)


def _honours_deterministic(backend, tensors, offsets):
    for deterministic in (True, False):
        options = {"backend": backend, "deterministic": deterministic, **offsets}
        with recorded(backend, tensors, offsets) as calls:
            first, second = (call(*tensors, **options) for _ in range(2))
        assert not deterministic or torch.equal(first, second)
        told = [given["deterministic"] for given in calls if "deterministic" in given]
        assert bool(told) == (backend in TOLD_DETERMINISTIC), f"{backend}: {len(told)} vendor calls have the flag"
        assert all(flag is deterministic for flag in told), f"{backend}: the vendor was told {told}"


def _honours_dropout(backend, packed, dtype):
    """A query that sees one key of ones gives 0, for the share that is to be dropped, or one over the share kept."""
    lengths, seqlen, batch = (240, 60, 100), 200, 2
    tokens, keys = (sum(lengths), len(lengths)) if packed else (seqlen, 1)
    shape = {"heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "dtype": dtype}
    query, key, value = dense(1 if packed else batch, tokens, keys, **shape)
    tensors, options = (query, key, torch.ones_like(value)), {"dropout_p": DROPPED, "backend": backend}
    if packed:
        tensors = tuple(tensor[0] for tensor in tensors)
        options["sequences"] = PackedSequences.from_lengths(lengths, [1] * len(lengths))
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        outputs.append(call(*tensors, **options).float())
        dropped = outputs[-1] == 0
        kept = outputs[-1][~dropped]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - DROPPED)), rtol=0.01, atol=0)
        share = dropped.all(-1).double().mean().item()
        # Five standard deviations of the 1600 rows or more.
        assert share == pytest.approx(DROPPED, abs=0.05), f"{backend} drops {share:.3f} of the weights"
    assert not torch.equal(*outputs), "the same weights dropped"


@contextlib.contextmanager
def recorded(backend, tensors, offsets):
    """Within it, what the backend gives its vendor's functions is kept: a dict of arguments for each call."""
    candidate = next(c for c in explain(*tensors, **offsets).considered if c.backend.name == backend)
    library, calls = getattr(candidate.backend, "library", None), []
    if library is None:
        yield calls
        return
    if is_dataclass(library) and hasattr(library, "module"):
        operator = {"operator": Recorder(library, calls).operator} if getattr(library, "operator", None) else {}
        recorder = replace(library, module=Recorder(library.module, calls), **operator)
    else:
        recorder = Recorder(library, calls)
    with mock.patch.object(candidate.backend, "library", recorder):
        yield calls


class Recorder:
    """A library that keeps the arguments of each call, defaults included."""

    def __init__(self, library, calls):
        self._library, self._calls = library, calls

    def __getattr__(self, name):
        function = getattr(self._library, name)
        if isinstance(function, SimpleNamespace) or not callable(function):
            return function
        signature = inspect.signature(function)

        @functools.wraps(function)
        def kept(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self._calls.append(dict(bound.arguments))
            return function(*args, **kwargs)

        return kept


def assert_right_at_scale(backend, packed, causal, scale):
    """The backend refuses such a call by `scale`, or gives the right output: never NaN."""
    tensors, offsets = plain_call(backend, packed)
    options = {**offsets, "causal": causal, "scale": scale}
    refusals = _refusals(backend, tensors, options)
    if refusals:
        assert "scale" in {refusal.rule for refusal in refusals}, [str(refusal) for refusal in refusals]
        return
    right = expected(*tensors, **options)
    output = call(*tensors, backend=backend, **options)
    assert_close_to_oracle(output, right.output, right.plain_output, f"{backend}: scale {scale}")


def backends_of(platform):
    """Names of the platform's backends, in its order for a plain call."""
    with simulating(platform):
        tensors, _ = inputs(False, torch.float16)
        select_backend(*tensors)
        return tuple(candidate.backend.name for candidate in explain(*tensors).considered)


def plain_call(backend, packed):
    """Tensors and offsets of a plain call that the backend takes on this platform, or None: it does not run there at
    all, or has no such hook."""
    for dtype in DTYPES:
        tensors, offsets = inputs(packed, dtype)
        refusals = _refusals(backend, tensors, offsets)
        if not refusals:
            return tensors, offsets
        assert {refusal.rule for refusal in refusals} <= {"dtype", "device", "hook"}, [str(r) for r in refusals]
    return None


def has_calls(platform, backend, packed):
    """Whether the table of that platform has a column for these calls of the backend."""
    with simulating(platform):
        return plain_call(backend, packed) is not None


def columns():
    """(platform, backend, packed) of every column of the tables."""
    return [
        (platform, backend, packed)
        for platform in PLATFORMS
        for backend in backends_of(platform)
        for packed in (False, True)
        if has_calls(platform, backend, packed)
    ]


def cells():
    """(platform, backend, packed, argument) of every cell of the tables."""
    return [
        (platform, backend, packed, argument)
        for platform, backend, packed in columns()
        for argument in arguments(packed, torch.float32)
    ]


def main():
    """Prints a table for each platform."""
    from rich.console import Console
    from rich.table import Table

    for platform in PLATFORMS:
        names = backends_of(platform)
        for packed in (False, True):
            table = Table("argument", *names, title=f"{platform}, {'packed' if packed else 'batched'}")
            with simulating(platform):
                for argument in arguments(packed, torch.float32):
                    cells = (verdict(name, packed, argument).partition(":")[0] for name in names)
                    table.add_row(argument, *cells)
            Console(width=160).print(table)


if __name__ == "__main__":
    main()
