"""What a compiled call decides when it runs: the backend, by the variables, the overrides and the simulation then."""

import threading

import pytest
import torch

from hal_attn import (
    ConfigurationError,
    UnsupportedAttentionError,
    attention,
    explain,
    memo,
    use_backend,
    varlen_attention,
)
from hal_attn.registry import default_registry
from tests.compile.cases import batched, packed
from tests.compile.tracing import Program, gradients, leaves, same

DEVICES = ("cuda:sm90,fa3=full", "cuda:sm100", "rocm", "ascend")


def run(query, key, value, backend=None):
    return attention(query, key, value, causal=True, backend=backend)


def packed_run(query, key, value, sequences, backend=None):
    return varlen_attention(query, key, value, sequences=sequences, causal=True, backend=backend)


@pytest.fixture
def taken(monkeypatch):
    """Names of the CPU backends that were called, in order."""
    names = []
    for backend in default_registry().platform("cpu").backends():

        def bind(request, backend=backend, bind=backend.bind):
            short = bind(request)
            return lambda *tensors: (
                names.append(backend.name)
                or (short(*tensors) if short else backend.forward(*tensors, **request.options()))
            )

        monkeypatch.setattr(backend, "bind", bind, raising=True)
    for name in ("_bound", "_recent"):
        monkeypatch.setattr(memo, name, {})
    return names


def test_a_changed_variable_counts_at_the_next_call_and_compiles_nothing(monkeypatch, taken):
    program = Program(run)
    made, _, _ = batched("causal")
    program(*made)
    monkeypatch.setenv("HAL_ATTN_BACKEND", "cpu_math")
    program(*made)
    monkeypatch.setenv("HAL_ATTN_BACKEND", "cpu_sdpa")
    program(*made)
    monkeypatch.delenv("HAL_ATTN_BACKEND")
    program(*made)
    assert taken == ["cpu_flash", "cpu_math", "cpu_sdpa", "cpu_flash"]
    assert program.graphs == 1
    monkeypatch.setenv("HAL_ATTN_FALLBACK", "perhaps")
    with pytest.raises(ConfigurationError, match="HAL_ATTN_FALLBACK: got 'perhaps'"):
        program(*made)


def test_use_backend_around_a_compiled_call(taken):
    program = Program(run)
    made, _, _ = batched("causal")
    program(*made)
    with use_backend("cpu_math"):
        program(*made)
        others = threading.Thread(target=program, args=made)
        others.start()
        others.join()
    assert taken == ["cpu_flash", "cpu_math", "cpu_flash"]


def test_use_backend_inside_a_compiled_program_is_never_lost(taken):
    def inside(query, key, value):
        with use_backend("cpu_math"):
            return attention(query, key, value, causal=True)

    made, _, _ = batched("causal")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        Program(inside)(*made)
    torch._dynamo.reset()
    # Where a graph may break, it is obeyed.
    torch.compile(inside, backend="aot_eager")(*made)
    assert set(taken) == {"cpu_math"}


def test_the_choice_follows_the_lengths_not_the_first_ones(monkeypatch):
    """The simulated device prefers another backend for long sequences; the program is the same."""
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda:sm90")
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "flash_attn_3")
    program = Program(run, dynamic=True)
    names, graphs = set(), set()
    # No two dimensions of one size: PyTorch takes those for one number at first.
    for size in (20, 2050):
        query = torch.randn(1, size, 2, 16, dtype=torch.bfloat16)
        names.add(explain(query, query, query, causal=True).chosen.name)
        same(program(query, query, query), run(query, query, query))
        graphs.add(program.graphs)
    assert len(names) == 2
    assert len(graphs) == 1


def test_a_length_that_no_backend_takes_is_refused_as_by_the_call(monkeypatch):
    monkeypatch.setenv("HAL_ATTN_BACKEND", "cpu_flash")
    program = Program(run, dynamic=True)
    query, key, value = batched("causal", 8)[0]
    program(query, key, value)
    with pytest.raises(UnsupportedAttentionError, match="its triangle is top-left"):
        program(query[:, :5], key, value)


def takers(inputs, **options):
    return [c.backend.name for c in explain(*inputs, causal=True, **options).considered if not c.refusals]


@pytest.mark.parametrize("device", DEVICES)
def test_every_simulated_backend_batched(device, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", device)
    made, _, _ = batched("causal", dtype=torch.bfloat16)
    inputs = leaves(*made)
    program, names = Program(run), takers(inputs)
    assert len(names) > 2
    for name in names:
        result, right = program(*inputs, name), run(*inputs, name)
        same(result, right, name)
        same(gradients(result, inputs), gradients(right, inputs), name)


@pytest.mark.parametrize("device", DEVICES)
def test_every_simulated_backend_packed(device, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", device)
    made, sequences, _, _ = packed("causal", [3, 5], dtype=torch.bfloat16)
    inputs = leaves(*made)
    program = Program(packed_run)
    training, inference = takers(inputs, sequences=sequences), takers(made, sequences=sequences)
    assert len(training) > 2
    for name in training:
        result, right = program(*inputs, sequences, name), packed_run(*inputs, sequences, name)
        same(result, right, name)
        same(gradients(result, inputs), gradients(right, inputs), name)
    for name in set(inference) - set(training):
        same(program(*made, sequences, name), packed_run(*made, sequences, name), name)
