"""Compiled calls on the NVIDIA device here: the calls that `test_hardware_compile` compares and captures.

`python -m tests.cuda.compiling` prints what each backend gave; it needs no pytest.
"""

import itertools
import sys

import torch

from hal_attn import PackedSequences, attention, explain, varlen_attention
from hal_attn.registry import default_registry
from tests.compile.tracing import Program, leaves
from tests.cuda import hardware
from tests.cuda.calls import HALF
from tests.support import dense, packed

LENGTHS = ((3, 200, 1, 129, 64), (70, 33, 300), (512,), (1, 2, 3, 4, 250, 6))
COMPILERS = ("aot_eager", "inductor")
# Of the largest value: a backward pass may add in any order, in bfloat16 two units in the last place.
TOLERANCE = 2.0**-6


def batched_call(query, key, value, backend):
    """A batched call."""
    return attention(query, key, value, causal=True, backend=backend)


def packed_call(query, key, value, sequences, backend):
    """A packed call by sequences."""
    return varlen_attention(query, key, value, sequences=sequences, causal=True, backend=backend)


def device_call(query, key, value, offsets, longest, backend):
    """A packed call whose offsets only the device knows."""
    return varlen_attention(query, key, value, cu_seqlens=offsets, max_seqlen=longest, causal=True, backend=backend)


def batch(length):
    """(query, key, value), `[2, length, 4, 64]` with two key heads."""
    return tuple(tensor.cuda() for tensor in dense(2, length, kv_heads=2, head_dim=64, dtype=HALF, seed=length))


def rows(lengths):
    """(query, key, value), and their sequences."""
    *tensors, _ = packed(lengths, kv_heads=2, head_dim=64, dtype=HALF, seed=sum(lengths))
    return tuple(tensor.cuda() for tensor in tensors), PackedSequences.from_lengths(lengths)


def calls(kind):
    """(function, the arguments after query, key and value, tensors) for some sizes."""
    if kind == "batched":
        return [(batched_call, (), batch(length)) for length in (200, 333, 96)]
    found = []
    for lengths in LENGTHS:
        tensors, sequences = rows(lengths)
        if kind == "packed":
            found.append((packed_call, (sequences,), tensors))
        else:
            offsets = PackedSequences.from_lengths(lengths, device="cuda").cu_seqlens
            found.append((device_call, (offsets, max(lengths)), tensors))
    return found


KINDS = ("batched", "packed", "device offsets")


def takes(backend, kind, *, gradients):
    """Whether the backend takes the calls of a kind."""
    for function, more, tensors in calls(kind):
        inputs = leaves(*tensors) if gradients else tensors
        options = {"causal": True}
        if function is packed_call:
            options["sequences"] = more[0]
        elif function is device_call:
            options |= {"cu_seqlens": more[0], "max_seqlen": more[1]}
        found = next(c for c in explain(*inputs, **options).considered if c.backend.name == backend)
        if found.refusals:
            return False
    return True


def reads_lengths(backend, kind):
    """Whether such a call has to wait for the device: without a packed kernel, the host must know the lengths."""
    found = next(b for b in default_registry().platform("cuda").backends() if b.name == backend)
    return kind == "device offsets" and not found.implements("forward_varlen")


def largest_difference(backend, kind, *, dynamic, compiler="aot_eager", gradients=True):
    """(difference from the call in output and gradients, relative to the largest value; graphs compiled by each size).

    Repeats of a backward pass may differ in the last bits on a device, so it is a number and not equality.
    """
    found = calls(kind)
    program, graphs, worst = Program(found[0][0], dynamic=dynamic, backend=compiler), [], 0.0
    for function, more, tensors in found if dynamic else found[:1]:
        inputs = leaves(*tensors) if gradients else tensors
        result, right = program(*inputs, *more, backend), function(*inputs, *more, backend)
        pairs = [(result.detach(), right.detach())]
        if gradients:
            weight = torch.randn_like(right)
            pairs += zip(*(torch.autograd.grad((part * weight).sum(), inputs) for part in (result, right)), strict=True)
        for have, need in pairs:
            difference = ((have - need).abs().max() / need.abs().max().clamp(min=1e-3)).item()
            # A NaN is larger than every number.
            worst = max(worst, difference) if difference == difference else torch.inf
        graphs.append(program.graphs)
    return worst, graphs


def without_waiting(backend, kind, *, gradients):
    """A compiled call, forward and backward, with any wait for the device an error; it has run once before."""
    function, more, tensors = calls(kind)[0]
    program, inputs = Program(function, dynamic=False), leaves(*tensors) if gradients else tensors
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            result = program(*inputs, *more, backend)
            if gradients:
                torch.autograd.grad(result, inputs, result.detach())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return result


def captured(backend, kind):
    """(output of a CUDA graph of a compiled call replayed over other values, output of the call on those)."""
    function, more, tensors = calls(kind)[0]
    program, static = Program(function, dynamic=False), tuple(tensor.clone() for tensor in tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            program(*static, *more, backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = program(*static, *more, backend)
    others = tuple(torch.randn_like(tensor) for tensor in tensors)
    for place, other in zip(static, others, strict=True):
        place.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    return output, function(*others, *more, backend)


def main(backends=()):
    wrong = False
    for backend in backends or hardware.BACKENDS:
        if hardware.unavailable(backend) is not None:
            print(f"{backend}: absent")
            continue
        for kind, gradients in itertools.product(KINDS, (True, False)):
            title = f"{backend}, {kind}, {'training' if gradients else 'inference'}"
            if not takes(backend, kind, gradients=gradients):
                print(f"{title}: refused")
                continue
            for compiler in COMPILERS:
                worst, graphs = largest_difference(backend, kind, dynamic=True, compiler=compiler, gradients=gradients)
                wrong |= worst > TOLERANCE or len(set(graphs)) > 1
                print(f"{title}, {compiler}: largest difference {worst:.2g}, graphs by size {graphs}")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
