"""On an Ascend machine: `pytest -m ascend tests/ascend/test_hardware.py`. Not part of the ordinary run.

Without a device these fail: asked for, they must not pass over its absence. They compare with the float64 oracle on the
CPU, on the generation that is there.
"""

import pytest
import torch

from hal_attn import (
    PackedSequences,
    attention,
    explain,
    reference_attention,
    reference_varlen_attention,
    varlen_attention,
)
from hal_attn.registry import default_registry
from tests.support import dense, packed, randn

pytestmark = pytest.mark.ascend


@pytest.fixture
def npu():
    platform = default_registry().platform("ascend")
    found = default_registry().detection(platform)
    assert found.available, f"{found.reason}; {found.remedy}"
    return torch.device("npu:0")


def moved(tensors, device):
    return [tensor.to(device) for tensor in tensors]


def check(found, right, tolerance=4e-3):
    torch.testing.assert_close(found.cpu().double(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 0)}, {"causal": True, "scale": 0.5}])
@pytest.mark.parametrize("lengths", [(33, 33), (7, 40), (40, 7), (1, 50)])
def test_batched(npu, lengths, options):
    inputs = dense(2, *lengths, heads=8, kv_heads=2, head_dim=64, dtype=torch.float16)
    right, right_lse = reference_attention(*(tensor.double() for tensor in inputs), **options)
    assert explain(*moved(inputs, npu), **options).chosen.name in ("ascend_fa", "ascend_pfa")
    check(attention(*moved(inputs, npu), **options), right)
    output, lse = attention(*moved(inputs, npu), return_lse=True, **options)
    check(output, right)
    check(lse, right_lse)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 0)}])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("lengths", [([30, 1, 12], None), ([3, 1, 20], [30, 4, 20]), ([30, 4], [3, 4])])
def test_packed(npu, lengths, dim, options):
    query, key, value, sequences = packed(*lengths, heads=8, kv_heads=2, head_dim=dim, dtype=torch.float16)
    doubles = (tensor.double() for tensor in (query, key, value))
    right, right_lse = reference_varlen_attention(*doubles, sequences, **options)
    inputs = moved((query, key, value), npu)
    on_npu = PackedSequences.from_lengths(*lengths)
    check(varlen_attention(*inputs, sequences=on_npu, **options), right)
    output, lse = varlen_attention(*inputs, sequences=on_npu, return_lse=True, **options)
    check(output, right)
    check(lse, right_lse)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 0)}])
@pytest.mark.parametrize("lengths", [(33, 33), (7, 40), (40, 7)])
def test_gradients(npu, lengths, options):
    inputs = dense(2, *lengths, heads=4, head_dim=64, dtype=torch.float16)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    right = torch.autograd.grad(reference_attention(*exact, **options)[0].sum(), exact)
    leaves = [tensor.to(npu).requires_grad_() for tensor in inputs]
    found = torch.autograd.grad(attention(*leaves, **options).sum(), leaves)
    for have, need in zip(found, right, strict=True):
        check(have, need, 2e-2)


@pytest.mark.parametrize("shape", [(2, 1, 1, 40), (1, 8, 33, 40), (1, 1, 33, 40)])
def test_masks(npu, shape):
    inputs = dense(2, 33, 40, heads=8, head_dim=64, dtype=torch.float16)
    added = randn(*shape, seed=1, dtype=torch.float16)
    for mask in (added > 0, added, added.masked_fill(added > 1, -torch.inf)):
        for options in ({}, {"causal": True}):
            exact = mask if mask.dtype == torch.bool else mask.double()
            right, _ = reference_attention(*(tensor.double() for tensor in inputs), mask=exact, **options)
            check(attention(*moved(inputs, npu), mask=mask.to(npu), **options), right)


def test_sinks(npu):
    inputs = dense(2, 33, 40, heads=8, head_dim=64, dtype=torch.float16)
    sinks = randn(8, seed=2)
    right, right_lse = reference_attention(*(tensor.double() for tensor in inputs), sinks=sinks.double(), causal=True)
    options = {"sinks": sinks.to(npu), "causal": True}
    check(attention(*moved(inputs, npu), **options), right)
    check(attention(*moved(inputs, npu), return_lse=True, **options)[1], right_lse)
