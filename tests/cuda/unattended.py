"""Every backend on the NVIDIA device here, unattended: a call never waits for the device, and a graph that captured one
replays it with other values.

`python -m tests.cuda.unattended [BACKEND ...]` prints the table; it needs no pytest.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tests.cuda import hardware
from tests.support import call


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replayed(run: Callable[[], object], change: Callable[[], None]) -> object:
    """The outputs of `run`, once a graph captured it, `change` gave its inputs other values, and the graph replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    change()
    graph.replay()
    torch.cuda.synchronize()
    return outputs


def cell(backend: str, name: str) -> str:
    """ "forward, bits, backward, graph": what was seen not to wait, to give the same bits with deterministic=True, and
    to replay; "refused: " and why; raises where it does not hold.

    Without deterministic=True a kernel may join its parts in any order: then equal means to PyTorch's tolerance for the
    dtype, far from what values of before would give.
    """
    made, options = hardware.CALLS[name]()
    tensors, options = tuple(tensor.cuda() for tensor in made), hardware.on_device(options)
    refused = hardware.refusals(backend, tensors, options)
    if refused:
        return f"refused: {refused[0]}"
    if not hardware.refusals(backend, tensors, {**options, "return_lse": True}):
        options = {**options, "return_lse": True}

    def run(**more: object) -> object:
        return call(*tensors, backend=backend, **options, **more)

    first, done = run(), ["forward"]
    with waiting_is_an_error():
        second = run()
    torch.testing.assert_close(second, first, equal_nan=True)
    if not hardware.refusals(backend, tensors, {**options, "deterministic": True}):
        torch.testing.assert_close(run(deterministic=True), run(deterministic=True), rtol=0, atol=0, equal_nan=True)
        done.append("bits")
    leaves = tuple(tensor.clone().requires_grad_() for tensor in tensors)
    without = {name: value for name, value in options.items() if name != "return_lse"}
    if not hardware.refusals(backend, leaves, without):
        _backward(backend, leaves, without)
        done.append("backward")
    expected = _of_flipped(run, tensors)
    outputs = replayed(run, lambda: _flip(tensors))
    torch.testing.assert_close(outputs, expected, equal_nan=True)
    return ", ".join([*done, "graph"])


def _flip(tensors: tuple[torch.Tensor, ...]) -> None:
    for tensor in tensors:
        tensor.copy_(tensor.flip(-1).neg())


def _of_flipped(run: Callable[[], object], tensors: tuple[torch.Tensor, ...]) -> object:
    """The answer for the other values, which must be far from that for these."""
    before = run()
    _flip(tensors)
    after = run()
    _flip(tensors)
    first, second = (result[0] if isinstance(result, tuple) else result for result in (before, after))
    assert not torch.allclose(first, second, rtol=0.05, atol=1e-4, equal_nan=True)
    return after


def _backward(backend: str, leaves: tuple[torch.Tensor, ...], options: dict[str, object]) -> None:
    """Forward and backward twice, the second time with any wait an error."""

    def both() -> tuple[torch.Tensor, ...]:
        output = call(*leaves, backend=backend, **options)
        assert isinstance(output, torch.Tensor)
        return torch.autograd.grad(output, leaves, torch.ones_like(output))

    both()
    with waiting_is_an_error():
        both()


def main(backends: tuple[str, ...] = ()) -> None:
    for backend in backends or hardware.BACKENDS:
        missing = hardware.unavailable(backend)
        for name in () if missing else hardware.CALLS:
            try:
                print(f"{backend:18} {name:28} {cell(backend, name)}", flush=True)
            except Exception as error:
                print(f"{backend:18} {name:28} WRONG {type(error).__name__}: {str(error)[:300]}", flush=True)
        if missing:
            print(f"{backend:18} absent: {missing}")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
