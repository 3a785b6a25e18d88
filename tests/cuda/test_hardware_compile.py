"""Compiled calls on a real NVIDIA device: `python -m pytest -m cuda tests/cuda/test_hardware_compile.py`."""

import pytest
import torch

from hal_attn.operators import ATTENTION, VARLEN_ATTENTION
from tests.compile.test_operators import check_both
from tests.compile.tracing import Program, gradients, leaves
from tests.cuda import compiling, hardware
from tests.cuda.compiling import TOLERANCE

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _device():
    assert torch.cuda.is_available(), "these tests were asked for, and there is no NVIDIA device"


@pytest.fixture(params=hardware.BACKENDS)
def backend(request):
    """Each backend; None where its library is not installed."""
    reason = hardware.unavailable(request.param)
    if reason is not None:
        assert request.param not in hardware.OWN, str(reason)
        return None
    return request.param


def taken(backend, kind, *, gradients):
    return backend is not None and compiling.takes(backend, kind, gradients=gradients)


@pytest.mark.parametrize("compiler", compiling.COMPILERS)
@pytest.mark.parametrize("kind", compiling.KINDS)
def test_any_size_by_one_graph_forward_and_backward(backend, kind, compiler):
    for wanted in (True, False):
        if taken(backend, kind, gradients=wanted):
            worst, graphs = compiling.largest_difference(
                backend, kind, dynamic=True, compiler=compiler, gradients=wanted
            )
            assert worst <= TOLERANCE
            assert len(set(graphs)) == 1, "another size was compiled anew"


@pytest.mark.parametrize("kind", compiling.KINDS)
def test_static_shapes(backend, kind):
    if taken(backend, kind, gradients=True):
        worst, _ = compiling.largest_difference(backend, kind, dynamic=False, compiler="inductor")
        assert worst <= TOLERANCE


@pytest.mark.parametrize("kind", compiling.KINDS)
def test_nothing_waits_for_the_device(backend, kind):
    for wanted in (True, False):
        if taken(backend, kind, gradients=wanted) and not compiling.reads_lengths(backend, kind):
            assert compiling.without_waiting(backend, kind, gradients=wanted).isfinite().all()


@pytest.mark.parametrize("kind", compiling.KINDS)
def test_a_cuda_graph_of_a_compiled_call_is_replayed_over_other_values(backend, kind):
    if taken(backend, kind, gradients=False) and not compiling.reads_lengths(backend, kind):
        output, right = compiling.captured(backend, kind)
        torch.testing.assert_close(output, right)


@pytest.mark.parametrize("name", ["torch_cudnn", "torch_flash", "torch_efficient", "torch_math"])
def test_the_operators_on_the_device(name):
    given = dict(zip(("query", "key", "value"), compiling.batch(48), strict=True))
    check_both(ATTENTION, given, {"causal": True, "backend": [name]})
    tensors, sequences = compiling.rows((3, 40, 1))
    given = {**dict(zip(("query", "key", "value"), tensors, strict=True)), "sequences": sequences.carrier}
    check_both(VARLEN_ATTENTION, given, {"causal": True, "backend": [name]})


def test_the_operators_by_default_choice():
    given = dict(zip(("query", "key", "value"), compiling.batch(48), strict=True))
    check_both(ATTENTION, given, {"causal": True})
    tensors, sequences = compiling.rows((3, 40, 1))
    given = {**dict(zip(("query", "key", "value"), tensors, strict=True)), "sequences": sequences.carrier}
    check_both(VARLEN_ATTENTION, given, {"causal": True})


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_block_in_every_mode_of_the_compiler_step_after_step(mode, training):
    """With lengths that change from step to step: a graph that the compiler captured must not keep the first ones."""

    def block(x, weight, sequences):
        query, key, value = (x @ weight.T).unflatten(-1, (3, 4, 64)).unbind(1)
        output = compiling.packed_call(query.cos(), key.sin(), value, sequences, None)
        return (output.flatten(1) + x).tanh()

    torch._dynamo.reset()
    program = torch.compile(block, mode=mode, fullgraph=True)
    weight = torch.randn(768, 256, device="cuda", dtype=torch.bfloat16) / 16
    for lengths in ((100, 28), (60, 68), (128,), (1, 126, 1), (64, 64)):
        _, sequences = compiling.rows(lengths)
        inputs = leaves(torch.randn(128, 256, device="cuda", dtype=torch.bfloat16), weight)
        torch.compiler.cudagraph_mark_step_begin()
        if not training:
            inputs = tuple(tensor.detach() for tensor in inputs)
        result, right = program(*inputs, sequences), block(*inputs, sequences)
        torch.testing.assert_close(result, right, rtol=TOLERANCE, atol=TOLERANCE)
        if training:
            loss = torch.randn_like(right)
            found, need = (torch.autograd.grad(part, inputs, loss) for part in (result, right))
            for have, exact in zip(found, need, strict=True):
                largest = exact.abs().max().item()
                torch.testing.assert_close(have, exact, rtol=0, atol=2 * TOLERANCE * largest)


def test_a_training_step_captured_by_hand():
    """Forward and backward of a compiled call in one CUDA graph, replayed over other values."""
    tensors = compiling.batch(200)
    program, static = Program(compiling.batched_call, dynamic=False), leaves(*tensors)
    weight = torch.randn(tensors[0].shape, device="cuda", dtype=tensors[0].dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(program(*static, "torch_flash"), static, weight)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(program(*static, "torch_flash"), static, weight)
    others = tuple(torch.randn_like(tensor) for tensor in tensors)
    with torch.no_grad():
        for place, other in zip(static, others, strict=True):
            place.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    inputs = leaves(*others)
    right = gradients(compiling.batched_call(*inputs, "torch_flash"), inputs, weight)
    for have, need in zip(found, right, strict=True):
        torch.testing.assert_close(have, need, rtol=0, atol=TOLERANCE * need.abs().max().item())
