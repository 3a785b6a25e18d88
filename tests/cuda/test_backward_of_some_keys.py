"""`backward_varlen`: gradients of a packed call whose keys are only some of those that made its output and LSE."""

import pytest
import torch
from hal_attn_cuda.simulated.cudnn import SimulatedCudnn

from hal_attn import AttentionBackend, PackedSequences, explain, varlen_attention
from hal_attn.chunked import chunked_gradients
from tests.cuda.hops import HOPS, backend_named, gradients_of_hops
from tests.sequence_parallel.case import Case, Degrees, answer, judge
from tests.support import assert_close_to_oracle, assert_right, dense, packed, randn

LENGTHS, LENGTHS_K = [5, 9, 3], [7, 4, 3]


def right(tensors, output, lse, gradient, scale, sequences, **options):
    """The gradients by plain PyTorch, one sequence at a time, from the same output and LSE in the given dtype."""
    parts = [[], [], []]
    lengths, lengths_k = list(sequences.lengths), list(sequences.lengths_k)
    rows = zip(
        *(t.split(n) for t, n in zip(tensors, (lengths, lengths_k, lengths_k), strict=True)),
        output.split(lengths),
        lse.split(lengths, 1),
        gradient.split(lengths),
        strict=True,
    )
    for row in rows:
        inputs = [part[None] for part in row]
        found = chunked_gradients(*inputs, torch.zeros_like(inputs[4]), scale=scale, **options)
        for part, grad in zip(parts, found, strict=True):
            part.append(grad[0])
    return [torch.cat(part) for part in parts]


def backend_for(name, tensors, sequences, **options):
    considered = explain(*tensors, sequences=sequences, **options).considered
    return next(candidate.backend for candidate in considered if candidate.backend.name == name)


def assert_equals_plain_pytorch(name, lengths, lengths_k, shape, **options):
    *tensors, sequences = packed(lengths, lengths_k, dtype=torch.bfloat16, **shape)
    output, lse = varlen_attention(*tensors, sequences=sequences, return_lse=True, backend="torch_math", **options)
    # As if other keys had a part in the result.
    lse = lse + 0.4
    gradient = randn(*output.shape, seed=8, dtype=output.dtype)
    backend = backend_for(name, tensors, sequences, **options)
    given = {"causal": options.get("causal", False), "window_size": options.get("window_size")}
    found = backend.backward_varlen(
        gradient, *tensors, output, lse, sequences=sequences, scale=0.2, deterministic=False, **given
    )
    assert found is not None
    rows = (output, lse, gradient)
    exact = right([t.double() for t in tensors], *(t.double() for t in rows), 0.2, sequences, **given)
    plain = right(tensors, *rows, 0.2, sequences, **given)
    largest = max(part.abs().max().item() for part in exact)
    for which, have, want, near in zip("qkv", found, exact, plain, strict=True):
        assert_close_to_oracle(have, want, near.to(have.dtype), f"{name}: {which}", largest_gradient=largest)


@pytest.mark.parametrize("name", ["torch_flash", "flash_attn_4"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (2, 1)}, {"window_size": (2, -1)}, {"window_size": (3, 0)}],
    ids=str,
)
def test_equals_plain_pytorch(simulate, name, options):
    simulate("sm90")
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 24, "value_head_dim": 16}
    assert_equals_plain_pytorch(name, LENGTHS, LENGTHS_K, shape, **options)


@pytest.mark.parametrize("shape", [{"head_dim": 16}, {"kv_heads": 2, "head_dim": 20, "value_head_dim": 12}], ids=str)
@pytest.mark.parametrize("name", ["torch_cudnn", "torch_flash", "flash_attn_4"])
@pytest.mark.parametrize(
    ("lengths", "lengths_k", "options"),
    [
        ([9], [9], {}),
        ([9], [9], {"causal": True}),
        ([5], [14], {}),
        ([14], [5], {}),
        ([6, 6, 6], [8, 8, 8], {}),
        ([7, 7], [7, 7], {"causal": True}),
    ],
    ids=str,
)
def test_equals_plain_pytorch_where_sequences_are_alike(simulate, name, shape, lengths, lengths_k, options):
    simulate("sm90")
    assert_equals_plain_pytorch(name, lengths, lengths_k, {"heads": 4, **shape}, **options)


@pytest.mark.parametrize("name", HOPS)
@pytest.mark.parametrize("backend", ["torch_cudnn", "torch_flash", "flash_attn_4"])
def test_hops_add_up_to_the_whole(simulate, backend, name):
    simulate("sm90")
    gradients_of_hops(HOPS[name], backend_named(backend, "cpu"), "cpu")


@pytest.mark.parametrize(
    ("lengths", "lengths_k", "options"),
    [
        ([9, 8], None, {}),
        ([9, 9], [4, 5], {}),
        ([5], [9], {"causal": True}),
        ([9], None, {"window_size": (2, 0)}),
        ([9], None, {"deterministic": True}),
        ([1], [9], {}),
        ([9], [1], {}),
        ([9], None, {"head_dim": 136}),
    ],
    ids=str,
)
def test_cudnn_leaves_the_rest_to_others(simulate, lengths, lengths_k, options):
    simulate("sm90")
    options = {"head_dim": 16, **options}
    shape = {"head_dim": options.pop("head_dim"), "heads": 2, "dtype": torch.float16}
    *tensors, sequences = packed(lengths, lengths_k, **shape)
    backend = backend_for("torch_cudnn", tensors, sequences)
    output, lse = varlen_attention(*tensors, sequences=sequences, return_lse=True)
    options = {"scale": 0.25, "causal": False, "window_size": None, "deterministic": False, **options}
    assert backend.backward_varlen(output, *tensors, output, lse, sequences=sequences, **options) is None


def test_cudnn_never_reads_offsets_from_the_device(simulate):
    """One sequence of whose length the host has only a bound."""
    simulate("sm90")
    *tensors, sequences = packed([9], heads=2, head_dim=16, dtype=torch.float16)
    backend = backend_for("torch_cudnn", tensors, sequences)
    output, lse = varlen_attention(*tensors, sequences=sequences, return_lse=True)
    unknown = PackedSequences.from_device_offsets(*sequences.offsets(torch.device("cpu")), 16, 16)
    options = {"scale": 0.25, "causal": False, "window_size": None, "deterministic": False}
    assert backend.backward_varlen(output, *tensors, output, lse, sequences=unknown, **options) is None


def test_tensors_that_lie_otherwise_are_laid_out_alike(simulate):
    """The kernel takes the strides of output and its gradient from those of query."""
    simulate("sm90")
    query, key, value, sequences = packed([6, 6], heads=2, head_dim=16, dtype=torch.float16)
    backend = backend_for("torch_cudnn", (query, key, value), sequences)
    output, lse = varlen_attention(query, key, value, sequences=sequences, return_lse=True)
    gradient = randn(12, 2, 16, seed=3, dtype=torch.float16)
    options = {"sequences": sequences, "scale": 0.25, "causal": True, "window_size": None, "deterministic": False}
    plain = backend.backward_varlen(gradient, query, key, value, output, lse, **options)
    turned = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (gradient, query, key, value, output)]
    given = (*turned, lse.transpose(0, 1).contiguous().transpose(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(backend.backward_varlen(*given, **options), plain, strict=True))


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"lengths": (16,)}, True),
        ({"lengths": (16,), "causal": True}, True),
        ({"lengths": (8, 8), "dense": True}, True),
        ({"lengths": (8, 6)}, False),
    ],
    ids=str,
)
def test_cudnn_computes_the_gradients_of_a_hop_whose_sequences_are_alike(simulate, monkeypatch, options, taken):
    """Before PyTorch's own flash kernel, which takes the others; FlashAttention 4 is not here."""
    simulate("sm90")
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "flash_attn_4")
    calls = []
    original = SimulatedCudnn._scaled_dot_product_cudnn_attention_backward

    def watched(self, *args, **given):
        calls.append(args[1].shape)
        return original(self, *args, **given)

    monkeypatch.setattr(SimulatedCudnn, "_scaled_dot_product_cudnn_attention_backward", watched)
    case = Case(Degrees(), head_dim=16, value_head_dim=16, dtype=torch.bfloat16, **options)
    judge(case, [answer(case)])
    assert bool(calls) == taken


def test_deterministic_is_left_to_those_who_have_it(simulate):
    simulate("sm90")
    *tensors, sequences = packed([4, 3], heads=2, head_dim=16, dtype=torch.float16)
    considered = explain(*tensors, sequences=sequences).considered
    flash = next(c.backend for c in considered if c.backend.name == "torch_flash")
    output, lse = varlen_attention(*tensors, sequences=sequences, return_lse=True)
    options = {"sequences": sequences, "scale": 0.25, "causal": False, "window_size": None}
    assert flash.backward_varlen(output, *tensors, output, lse, deterministic=True, **options) is None
    assert flash.backward_varlen(output, *tensors, output, lse, deterministic=False, **options) is not None


def test_the_contract_has_none_by_default():
    assert (
        AttentionBackend.backward_varlen(
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            sequences=PackedSequences.from_lengths([1]),
            scale=1.0,
            causal=False,
            window_size=None,
            deterministic=False,
        )
        is None
    )


@pytest.mark.parametrize("dim", [8, 72, 80, 104])
def test_head_dims_that_the_backward_kernel_rounds_wrongly_are_padded(simulate, dim):
    simulate("sm90")
    assert "flash_attn_4" in assert_right(*dense(1, 9, heads=2, head_dim=dim, dtype=torch.bfloat16))
