"""Each argument of each backend: honoured (its value reaches the output, rightly) or refused (by its name).

`python -m tests.arguments` prints the tables; `test_arguments` makes every cell a test.
"""

from __future__ import annotations

import os
from unittest import mock

import torch

from hal_attn import PackedSequences, explain, select_backend
from tests.support import assert_close_to_oracle, call, dense, expected, randn

# One device a vendor; the others differ in what they refuse, not in what an argument means.
PLATFORMS = ("cpu", "cuda:sm90", "rocm:gfx942", "ascend:Ascend910B1", "ascend:Ascend310P3")
LENGTHS = (5, 8, 3)
HEADS, KV_HEADS, DIM = 4, 2, 64
# What a refusal of an argument may be called; a mask is refused by its kind or by its dtype.
RULES = {"dropout_p": ("dropout_p", "dropout"), "gradients": ("gradients", "dtype"), "grouped heads": ("heads",)}
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
        "dropout_p": {"dropout_p": 0.5},
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
    plain = call(*(t.detach() for t in inputs("sequences" in offsets, tensors[0].dtype)[0]), backend=backend, **offsets)
    torch.manual_seed(0)
    result = call(*tensors, backend=backend, **offsets, **given)
    if argument == "deterministic":
        assert torch.equal(result, call(*tensors, backend=backend, **offsets, **given))
        return
    if argument == "dropout_p":
        torch.manual_seed(1)
        assert not torch.equal(result, call(*tensors, backend=backend, **offsets, **given)), "the same weights dropped"
        return
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


def cells():
    """(platform, backend, packed, argument) of every cell of the tables."""
    return [
        (platform, backend, packed, argument)
        for platform in PLATFORMS
        for backend in backends_of(platform)
        for packed in (False, True)
        for argument in arguments(packed, torch.float32)
        if has_calls(platform, backend, packed)
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
