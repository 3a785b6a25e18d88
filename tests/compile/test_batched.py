"""Compiled batched calls, forward and backward: what the call itself gives, to the bit, and right by the oracle."""

import pytest
import torch

from hal_attn import attention, explain, merge_attention_states
from tests.compile.cases import BATCHED, batched
from tests.compile.tracing import Program, gradients, leaves, same
from tests.support import CPU_BACKENDS, assert_close_to_oracle, expected


def run(query, key, value, tensors, options):
    return attention(query, key, value, **tensors, **options)


def takers(inputs, given, options):
    return [name for name in CPU_BACKENDS if not _refusals(name, inputs, {**given, **options})]


def _refusals(name, inputs, options):
    return next(c.refusals for c in explain(*inputs, **options).considered if c.backend.name == name)


def alike(program, name, size, backend=None):
    """Compares output and gradients of the compiled call with those of the call."""
    made, options, tensors = batched(name, size)
    options = {**options, "backend": backend}
    inputs = leaves(*made)
    wanting = {key: leaves(tensor)[0] for key, tensor in tensors.items()} if backend in (None, "cpu_math") else tensors
    result, right = program(*inputs, wanting, options), run(*inputs, wanting, options)
    same(result, right, name)
    every = (*inputs, *(tensor for tensor in wanting.values() if tensor.requires_grad))
    same(gradients(result, every), gradients(right, every), f"{name}: gradients")
    with torch.no_grad():
        same(program(*inputs, tensors, options), run(*inputs, tensors, options), f"{name}: inference")
    return result


@pytest.mark.parametrize("name", BATCHED)
def test_each_option_forward_and_backward(name):
    program = Program(run)
    made, options, tensors = batched(name)
    result = alike(program, name, 7)
    right = expected(*made, **{k: v for k, v in options.items() if k not in ("return_lse", "deterministic")}, **tensors)
    output = result[0] if isinstance(result, tuple) else result
    assert_close_to_oracle(output, right.output, right.plain_output)
    if isinstance(result, tuple):
        assert_close_to_oracle(result[1], right.lse, right.plain_lse, "LSE")


@pytest.mark.parametrize("name", BATCHED)
def test_each_option_with_dynamic_shapes_is_compiled_once(name):
    program = Program(run, dynamic=True)
    alike(program, name, 7)
    graphs = program.graphs
    for size in (9, 12):
        alike(program, name, size)
    assert program.graphs == graphs, "another length was compiled anew"


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", ["causal", "mask", "key padding", "grouped heads"])
def test_each_backend(name, backend):
    made, options, tensors = batched(name)
    assert backend in takers(leaves(*made), tensors, options)
    alike(Program(run), name, 7, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_each_dtype(dtype):
    made, options, _ = batched("causal", dtype=dtype)
    inputs, program = leaves(*made), Program(run)
    result, right = program(*inputs, {}, options), run(*inputs, {}, options)
    assert result.dtype == dtype
    same(result, right)
    same(gradients(result, inputs), gradients(right, inputs))


def test_static_shapes_and_then_automatic_dynamic_ones():
    program = Program(run)
    for size in (5, 6, 8, 11):
        alike(program, "causal", size)
    # Each of the first two lengths, with gradients and without; then all others by the graphs of the second.
    assert program.graphs == 4


def test_a_scale_that_changes_is_a_number_of_the_call():
    def scaled(query, key, value, scale):
        return attention(query, key, value, scale=scale)

    program = Program(scaled, dynamic=True)
    made, _, _ = batched("plain")
    for scale in (0.5, 0.25, 0.125):
        same(program(*made, scale), scaled(*made, scale))


def test_a_scale_from_a_symbolic_head_dim():
    def scaled(query, key, value):
        return attention(query, key, value, scale=query.shape[-1] ** -0.5, causal=True)

    program = Program(scaled, dynamic=True)
    for dim in (8, 16, 24):
        made = tuple(tensor[..., :1].expand(2, 7, 4, dim).contiguous() for tensor in batched("plain")[0])
        same(program(*made), scaled(*made))


def test_only_some_inputs_want_a_gradient():
    made, options, _ = batched("causal")
    for wanted in (0, 1, 2):
        inputs = [tensor.detach().clone().requires_grad_(index == wanted) for index, tensor in enumerate(made)]
        result, right = Program(run)(*inputs, {}, options), run(*inputs, {}, options)
        same(gradients(result, [inputs[wanted]]), gradients(right, [inputs[wanted]]))


def test_a_gradient_through_the_lse_alone():
    made, options, _ = batched("LSE")
    inputs = leaves(*made)
    results = Program(run)(*inputs, {}, options), run(*inputs, {}, options)
    found = [torch.autograd.grad(lse.sum(), inputs, allow_unused=True, materialize_grads=True) for _, lse in results]
    same(*found)
    assert found[0][0].abs().max() > 0


def test_dropout_obeys_its_seed_and_drops_what_it_says():
    program = Program(run)
    query = torch.zeros(1, 64, 2, 8, requires_grad=True)
    key, value = torch.zeros(1, 64, 2, 8), torch.ones(1, 64, 2, 8)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(program(query, key, value, {}, {"dropout_p": 0.5}))
    torch.manual_seed(1)
    same(draws[0], run(query, key, value, {}, {"dropout_p": 0.5}))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert draws[0].mean().item() == pytest.approx(1.0, abs=0.05)


def test_inside_autocast_the_dtype_is_that_of_query():
    def model(query, key, value):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(query, key, value, causal=True)

    inputs = leaves(*batched("causal")[0])
    result, right = Program(model)(*inputs), model(*inputs)
    assert result.dtype == torch.float32
    same(result, right)
    same(gradients(result, inputs), gradients(right, inputs))


def test_autocast_around_a_compiled_model():
    def model(x, weight):
        query, key, value = torch.nn.functional.linear(x, weight).unflatten(-1, (3, 2, 16)).unbind(2)
        return attention(query, key, value, causal=True).flatten(2)

    inputs = leaves(torch.randn(2, 7, 8), torch.randn(96, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, right = Program(model)(*inputs), model(*inputs)
    assert result.dtype == torch.bfloat16
    same(result, right)
    same(gradients(result, inputs), gradients(right, inputs))


def test_layouts_by_view_keep_their_gradients():
    def model(fused):
        query, key, value = fused.unflatten(-1, (3, 4, 16)).unbind(2)
        return attention(query, key, value, causal=True)

    def heads_first(query, key, value):
        return attention(*(tensor.transpose(1, 2) for tensor in (query, key, value))).transpose(1, 2)

    (fused,) = leaves(torch.randn(2, 7, 192))
    result, right = Program(model)(fused), model(fused)
    same((result, *gradients(result, (fused,))), (right, *gradients(right, (fused,))))
    inputs = leaves(*(torch.randn(2, 4, 7, 16) for _ in range(3)))
    result, right = Program(heads_first)(*inputs), heads_first(*inputs)
    same((result, *gradients(result, inputs)), (right, *gradients(right, inputs)))


@pytest.mark.parametrize("shape", [(0, 3, 4, 16), (2, 0, 4, 16), (2, 3, 4, 16)], ids=str)
def test_calls_without_queries_or_keys(shape):
    query, key = torch.randn(*shape, requires_grad=True), torch.randn(shape[0], 0, 4, 16, requires_grad=True)
    result, right = Program(run)(query, key, key, {}, {}), run(query, key, key, {}, {})
    same(result, right)
    same(gradients(result, (query, key)), gradients(right, (query, key)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_partial_results_are_merged(dynamic):
    def split(query, key, value):
        half = key.shape[1] // 2
        parts = [attention(query, key[:, s], value[:, s], return_lse=True) for s in (slice(half), slice(half, None))]
        return merge_attention_states(*zip(*parts, strict=True))

    program, graphs = Program(split, dynamic=dynamic), []
    for size in (8, 10, 12) if dynamic else (8,):
        inputs = leaves(*batched("plain", size)[0])
        result, right = program(*inputs), split(*inputs)
        same(result, right)
        same(gradients(result, inputs), gradients(right, inputs))
        graphs.append(program.graphs)
    assert len(set(graphs)) == 1, "another length was compiled anew"
