"""`backward_varlen`: gradients of a packed call whose keys are only some of those that made its output and LSE."""

import pytest
import torch

from hal_attn import AttentionBackend, PackedSequences, explain, varlen_attention
from hal_attn.chunked import chunked_gradients
from tests.support import assert_close_to_oracle, assert_right, dense, packed, randn

LENGTHS, LENGTHS_K = [5, 9, 3], [7, 4, 3]


def right(tensors, output, lse, gradient, scale, **options):
    """The gradients by plain PyTorch, one sequence at a time, from the same output and LSE in the given dtype."""
    parts = [[], [], []]
    rows = zip(
        *(t.split(n) for t, n in zip(tensors, (LENGTHS, LENGTHS_K, LENGTHS_K), strict=True)),
        output.split(LENGTHS),
        lse.split(LENGTHS, 1),
        gradient.split(LENGTHS),
        strict=True,
    )
    for row in rows:
        inputs = [part[None] for part in row]
        found = chunked_gradients(*inputs, torch.zeros_like(inputs[4]), scale=scale, **options)
        for part, grad in zip(parts, found, strict=True):
            part.append(grad[0])
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("name", ["torch_flash", "flash_attn_4"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (2, 1)}, {"window_size": (2, -1)}, {"window_size": (3, 0)}],
    ids=str,
)
def test_equals_plain_pytorch(simulate, name, options):
    simulate("sm90")
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 24, "value_head_dim": 16, "dtype": torch.bfloat16}
    *tensors, sequences = packed(LENGTHS, LENGTHS_K, **shape)
    output, lse = varlen_attention(*tensors, sequences=sequences, return_lse=True, backend="torch_math", **options)
    # As if other keys had a part in the result.
    lse = lse + 0.4
    gradient = randn(*output.shape, seed=8, dtype=output.dtype)
    considered = explain(*tensors, sequences=sequences, **options).considered
    backend = next(candidate.backend for candidate in considered if candidate.backend.name == name)
    given = {"causal": options.get("causal", False), "window_size": options.get("window_size")}
    found = backend.backward_varlen(
        gradient, *tensors, output, lse, sequences=sequences, scale=0.2, deterministic=False, **given
    )
    exact = right([t.double() for t in tensors], output.double(), lse.double(), gradient.double(), 0.2, **given)
    plain = right(tensors, output, lse, gradient, 0.2, **given)
    largest = max(part.abs().max().item() for part in exact)
    for which, have, want, near in zip("qkv", found, exact, plain, strict=True):
        assert_close_to_oracle(have, want, near.to(have.dtype), f"{name}: {which}", largest_gradient=largest)


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
