"""Every backend on the NVIDIA device here: what it takes is right against the float64 oracle, the rest it refuses.

`python -m tests.cuda.hardware [BACKEND ...]` prints the table; it needs no pytest.
"""

import sys
from functools import cache, partial

import torch

from hal_attn import PackedSequences, attention, explain, varlen_attention
from hal_attn.errors import UnsupportedAttentionError
from hal_attn.registry import default_registry
from tests.cuda.calls import HALF
from tests.support import assert_close_to_oracle, call, dense, expected, packed, randn

OWN = ("torch_cudnn", "torch_flash", "torch_efficient", "torch_math")
BACKENDS = ("flash_attn_3", "flash_attn_4", "flash_attn", "flashinfer_cudnn", *OWN)
LENGTHS, LENGTHS_K = (3, 200, 1, 129, 64), (130, 200, 7, 65, 96)


def batched(seqlen_q, seqlen_k, **options):
    shape = {name: options.pop(name) for name in _SHAPE if name in options}
    return dense(2, seqlen_q, seqlen_k, **{"dtype": HALF, "head_dim": 64, **shape}), options


def sequences(lengths, lengths_k=None, **options):
    shape = {name: options.pop(name) for name in _SHAPE if name in options}
    *tensors, packing = packed(lengths, lengths_k, **{"dtype": HALF, "head_dim": 64, **shape})
    return tuple(tensors), {"sequences": packing, **options}


def hiding(*, blind=False):
    visible = randn(2, 1, 200, 333, seed=7) > -0.3
    visible[..., 0] = True
    if blind:
        visible[1, 0, 150] = False
    return visible


_SHAPE = ("kv_heads", "head_dim", "value_head_dim", "dtype")
PADDING = torch.arange(333) < torch.tensor([[333], [250]])
SINKS = randn(4, seed=11)
SLOPES = randn(4, seed=12).abs() / 4
F16, F32 = torch.float16, torch.float32
CALLS = {
    "plain": lambda: batched(200, 333),
    "one query": lambda: batched(1, 333, kv_heads=2),
    "one key": lambda: batched(200, 1),
    "float16": lambda: batched(200, 333, dtype=F16, causal=True),
    "float32": lambda: batched(200, 333, dtype=F32, causal=True),
    "scale": lambda: batched(200, 333, scale=0.05),
    "scale 0": lambda: batched(200, 333, scale=0.0, causal=True),
    "scale below 0": lambda: batched(200, 200, scale=-0.3, causal=True),
    "scale below 0, full": lambda: batched(200, 333, scale=-0.3),
    "grouped heads": lambda: batched(200, 333, kv_heads=2, head_dim=128),
    "one key head": lambda: batched(200, 200, kv_heads=1, causal=True),
    "head dim 20 and 12": lambda: batched(200, 333, head_dim=20, value_head_dim=12),
    "head dim 72": lambda: batched(200, 200, head_dim=72, causal=True),
    "head dim 128": lambda: batched(200, 200, head_dim=128, causal=True),
    "head dim 192 and 128": lambda: batched(200, 200, head_dim=192, value_head_dim=128, causal=True),
    "head dim 256": lambda: batched(200, 200, head_dim=256, causal=True),
    "causal": lambda: batched(333, 333, causal=True),
    "causal, more keys": lambda: batched(200, 333, causal=True, kv_heads=2),
    "causal, blind rows": lambda: batched(333, 200, causal=True, kv_heads=2),
    "window": lambda: batched(200, 333, window_size=(100, 17)),
    "causal window": lambda: batched(200, 333, window_size=(64, 0)),
    "left window, more queries": lambda: batched(333, 200, window_size=(20, -1)),
    "right window, more queries": lambda: batched(333, 100, window_size=(-1, 150)),
    "blind window": lambda: batched(333, 200, window_size=(20, 10)),
    "softcap": lambda: batched(200, 333, softcap=3.0, causal=True),
    "sinks": lambda: batched(200, 333, sinks=SINKS),
    "sinks, blind rows": lambda: batched(333, 200, sinks=SINKS, causal=True),
    "alibi": lambda: batched(200, 333, alibi_slopes=SLOPES),
    "mask": lambda: batched(200, 333, mask=hiding(), kv_heads=2),
    "mask, blind rows": lambda: batched(200, 333, mask=hiding(blind=True)),
    "float mask": lambda: batched(200, 333, mask=randn(2, 4, 200, 333, seed=5, dtype=HALF)),
    "float mask of heads": lambda: batched(200, 333, mask=randn(1, 4, 200, 333, seed=5, dtype=HALF), causal=True),
    "mask, causal window": lambda: batched(200, 333, mask=hiding(), window_size=(90, 0)),
    "mask, float32": lambda: batched(200, 333, mask=hiding(blind=True), dtype=F32),
    "padding": lambda: batched(200, 333, key_padding_mask=PADDING, head_dim=72),
    "packed": lambda: sequences(LENGTHS, kv_heads=2),
    "packed, alike": lambda: sequences((96, 96, 96), kv_heads=2),
    "packed, one": lambda: sequences((96,), causal=True),
    "packed, causal": lambda: sequences(LENGTHS, causal=True, head_dim=72),
    "packed, head dim 128": lambda: sequences(LENGTHS, causal=True, head_dim=128, kv_heads=1),
    "packed, unequal": lambda: sequences(LENGTHS, LENGTHS_K),
    "packed, one side empty": lambda: sequences((3, 0, 129), (5, 70, 0), causal=True),
    "packed, blind rows": lambda: sequences(LENGTHS, LENGTHS_K, causal=True, kv_heads=2),
    "packed, window": lambda: sequences(LENGTHS, LENGTHS_K, window_size=(30, 9)),
    "packed, left window": lambda: sequences(LENGTHS_K, LENGTHS, window_size=(30, -1)),
    "packed, right window": lambda: sequences(LENGTHS_K, LENGTHS, window_size=(-1, 5)),
    "packed, scale below 0": lambda: sequences(LENGTHS, LENGTHS_K, scale=-0.3),
    "packed, causal window": lambda: sequences(LENGTHS, window_size=(30, 0)),
    "packed, softcap": lambda: sequences(LENGTHS, softcap=2.0),
    "packed, sinks": lambda: sequences(LENGTHS, LENGTHS_K, causal=True, sinks=SINKS),
    "packed, alibi": lambda: sequences(LENGTHS, LENGTHS_K, alibi_slopes=SLOPES.expand(len(LENGTHS), 4)),
    "packed, float32": lambda: sequences(LENGTHS, dtype=F32, causal=True),
}
# PERFORMANCE's shapes: batch, length, heads, key heads, head dim, causal.
SHAPES = [
    (16, 1024, 16, 16, 128, True),
    (4, 4096, 16, 16, 128, True),
    (1, 16384, 16, 16, 128, True),
    (1, 16384, 16, 16, 128, False),
    (4, 4096, 32, 8, 128, True),
    (4, 4096, 32, 32, 64, False),
    (2, 8192, 16, 16, 64, True),
]
PACKED_SHAPES = [
    ((16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 32), 16, 16, 128, False),
    ((16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 32), 32, 8, 128, True),
    ((1500,) * 20, 16, 16, 64, False),
]


@cache
def right(name):
    tensors, options = CALLS[name]()
    return expected(*tensors, device="cuda", **options)


def on_device(values):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def unavailable(name):
    """Why the backend's library is not there, or None."""
    platform = default_registry().platform("cuda")
    return default_registry().unavailable(next(backend for backend in platform.backends() if backend.name == name))


def declared(name, dtype):
    """How many times the error of the precision rule the backend declares."""
    backends = default_registry().platform("cuda").backends()
    return next(backend for backend in backends if backend.name == name).tolerances.get(dtype, 1.0)


def refusals(backend, tensors, options):
    return next(c for c in explain(*tensors, **options).considered if c.backend.name == backend).refusals


def cell(backend, name):
    """ "output, LSE, gradients" as far as the backend takes them, or "refused: " and why; raises where one is wrong."""
    made, options = CALLS[name]()
    tensors, options = tuple(tensor.cuda() for tensor in made), on_device(options)
    refused = refusals(backend, tensors, options)
    if refused:
        return f"refused: {refused[0]}"
    answer, done = right(name), ["output"]
    close = partial(assert_close_to_oracle, declared=declared(backend, tensors[0].dtype))
    output = call(*tensors, backend=backend, **options)
    assert output.dtype == tensors[0].dtype
    close(output.cpu(), answer.output, answer.plain_output)
    if not refusals(backend, tensors, {**options, "return_lse": True}):
        output, lse = call(*tensors, backend=backend, return_lse=True, **options)
        close(output.cpu(), answer.output, answer.plain_output, "output beside the LSE")
        close(lse.cpu(), answer.lse, answer.plain_lse, "LSE")
        done.append("LSE")
    leaves = tuple(tensor.clone().requires_grad_() for tensor in tensors)
    if not refusals(backend, leaves, options):
        output = call(*leaves, backend=backend, **options)
        found = torch.autograd.grad((output * answer.weight.cuda()).sum(), leaves)
        largest = max(gradient.abs().max().item() for gradient in answer.gradients)
        for have, exact, plain in zip(found, answer.gradients, answer.plain_gradients, strict=True):
            close(have.cpu(), exact, plain, "gradient", largest_gradient=largest)
        done.append("gradients")
    return ", ".join(done)


def chosen():
    """The backend that each measured shape gets by default, as lines."""
    lines = []
    for batch, length, heads, kv_heads, dim, causal in SHAPES:
        query = torch.empty(batch, length, heads, dim, dtype=HALF, device="cuda")
        key = torch.empty(batch, length, kv_heads, dim, dtype=HALF, device="cuda")
        name = explain(query, key, key, causal=causal).chosen.name
        lines.append(f"B{batch} S{length} H{heads}/{kv_heads} D{dim} {'causal' if causal else 'full'}: {name}")
    for lengths, heads, kv_heads, dim, causal in PACKED_SHAPES:
        query = torch.empty(sum(lengths), heads, dim, dtype=HALF, device="cuda")
        key = torch.empty(sum(lengths), kv_heads, dim, dtype=HALF, device="cuda")
        packing = PackedSequences.from_lengths(lengths)
        name = explain(query, key, key, sequences=packing, causal=causal).chosen.name
        kind = "causal" if causal else "full"
        lines.append(f"packed {len(lengths)} of at most {max(lengths)} H{heads}/{kv_heads} D{dim} {kind}: {name}")
    return lines


def dropout_ratio(backend):
    """The mean of an output whose values are all 1, with half the weights dropped."""
    query, key, value = (tensor.cuda() for tensor in batched(256, 256)[0])
    return attention(query, key, torch.ones_like(value), dropout_p=0.5, backend=backend).float().mean().item()


def packed_call_twice(backend, **options):
    """A packed call whose lengths the host knows, then the same with any wait for the device an error."""
    tensors, given = sequences(LENGTHS, kv_heads=2)
    tensors = tuple(tensor.cuda() for tensor in tensors)
    first = varlen_attention(*tensors, backend=backend, **given, **options)
    torch.cuda.synchronize()
    packing = PackedSequences.from_lengths(LENGTHS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = varlen_attention(*tensors, sequences=packing, backend=backend, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return first, second


def difference_at_the_end(backend, count, queries, keys, device="cuda"):
    """Of output and gradients of the last of `count` sequences, from those of a call of it alone: the largest, in parts
    of the largest value; None where the backend refuses."""
    shapes = [(count, queries, 4, 128), (count, keys, 4, 128), (count, keys, 4, 128)]
    generator = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, generator=generator, device=device, dtype=HALF)
    tensors = [make(shape).requires_grad_() for shape in shapes]
    last = [tensor[-1:].detach().requires_grad_() for tensor in tensors]
    gradient = make((1, queries, 4, 128))
    try:
        whole = attention(*tensors, backend=backend)
    except UnsupportedAttentionError:
        return None
    alone = attention(*last, backend=backend)
    found = [whole, *torch.autograd.grad(whole, tensors, gradient.expand_as(whole))]
    right = [alone, *torch.autograd.grad(alone, last, gradient)]
    pairs = zip(found, right, strict=True)
    return max(((a[-1:] - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def table(cells):
    """The cells `{(backend, call): text}` as lines: O output, L LSE, G gradients, - refused, with the reasons below."""
    names = [name for name in CALLS if any(call == name for _, call in cells)]
    backends = [backend for backend in BACKENDS if any(have == backend for have, _ in cells)]
    width = max(map(len, names), default=0)
    lines = [" " * width + " ".join(f"{backend:>17}" for backend in backends)]
    reasons = []
    for name in names:
        marks = []
        for backend in backends:
            text = cells.get((backend, name), "")
            letters = "".join(letter for letter in ("O", "L", "G") if _MEANS[letter] in text.split(", "))
            marks.append(letters or text.partition(":")[0][:17])
            if not letters and text:
                reasons.append(f"{backend}, {name}: {text}")
        lines.append(f"{name:{width}}" + " ".join(f"{mark:>17}" for mark in marks))
    return [*lines, "", *reasons]


_MEANS = {"O": "output", "L": "LSE", "G": "gradients"}


def main(backends=()):
    cells = {}
    for backend in backends or BACKENDS:
        missing = unavailable(backend)
        for name in CALLS:
            if missing is not None:
                cells[backend, name] = f"absent: {missing}"
                break
            try:
                cells[backend, name] = cell(backend, name)
            except Exception as error:
                cells[backend, name] = f"WRONG: {type(error).__name__}: {str(error)[:300]}"
    print("\n".join([*table(cells), "", *chosen()]))
    return any(text.startswith("WRONG") for text in cells.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
