"""Acme's platform: found with its device and not without it, its rule, its choices, and what its adapters translate."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from hal_attn import (
    PackedSequences,
    UnsupportedAttentionError,
    attention,
    explain,
    merge_attention_states,
    platforms,
    reference_attention,
    reference_varlen_attention,
    varlen_attention,
)

from acme_torch import kernels
from hal_attn_acme.platform import AcmePlatform
from hal_attn_acme.simulated import SimulatedAcme, simulated_kernels

PACKED = next(backend for backend in AcmePlatform().backends() if backend.name == "acme_packed")


def tensors(*shape: int, dtype: torch.dtype = torch.float32, device: str = "acme") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(3)]


def assert_right(found, right, tolerance: float = 1e-5) -> None:
    for have, want in zip(found, right, strict=True):
        torch.testing.assert_close(have.double().cpu(), want.double().cpu(), rtol=tolerance, atol=tolerance)


def status_with(**variables: str) -> dict[str, object]:
    """What a process with these variables says of the platform."""
    code = (
        "import json; from hal_attn import platforms;"
        "found = next(status for status in platforms() if status.name == 'acme');"
        "print(json.dumps([found.available, found.reason, found.remedy]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_it_is_found_by_its_entry_point():
    status = next(status for status in platforms() if status.name == "acme")
    assert status.available, status.reason
    assert [device.device for device in status.devices] == ["acme:0"]


def test_without_a_device_it_says_why_and_what_to_do():
    assert status_with(ACME_VISIBLE_DEVICES="-1") == [
        False,
        "ACME_VISIBLE_DEVICES='-1' hides every Acme device",
        "unset ACME_VISIBLE_DEVICES",
    ]
    available, reason, _ = status_with(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert not available
    assert "did not load acme_torch" in reason


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "acme_packed"), (torch.float16, "acme_fused"), (torch.bfloat16, "torch_math")],
)
def test_the_first_of_the_order_that_takes_a_call_answers_it(dtype, name):
    inputs = tensors(2, 8, 4, 32, dtype=dtype)
    assert explain(*inputs).chosen.name == name
    output = attention(*inputs)
    assert output.device == torch.device("acme:0")
    assert_right([output], reference_attention(*inputs)[:1], 2e-2 if dtype == torch.bfloat16 else 2e-3)


def test_the_rule_of_the_platform_holds_for_every_backend():
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(*tensors(1, 2, 129, 8))
    reasons = dict(caught.value.refusals)
    assert set(reasons) == {"acme_fused", "acme_packed", "torch_math"}
    for refusals in reasons.values():
        assert any(refusal.rule == "heads" and "at most 128" in refusal.need for refusal in refusals)
    assert attention(*tensors(1, 2, 128, 8)).shape == (1, 2, 128, 8)


def test_what_no_kernel_of_acme_takes_is_plain_pytorch_gradients_included():
    inputs = [tensor.requires_grad_() for tensor in tensors(1, 6, 4, 32)]
    assert explain(*inputs, softcap=5.0).chosen.name == "torch_math"
    attention(*inputs, softcap=5.0).sum().backward()
    exact = [tensor.detach().cpu().requires_grad_() for tensor in inputs]
    reference_attention(*exact, softcap=5.0)[0].sum().backward()
    assert_right([tensor.grad for tensor in inputs], [tensor.grad for tensor in exact])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 0.0}], ids=str)
def test_packed_calls(options):
    sequences = PackedSequences.from_lengths([5, 0, 2, 9])
    inputs = tensors(16, 4, 32)
    found = varlen_attention(*inputs, sequences=sequences, return_lse=True, backend="acme_packed", **options)
    assert_right(found, reference_varlen_attention(*inputs, sequences, **options))


def test_ring_chunks_merge_to_the_whole_and_a_triangle_needs_a_square():
    query, key, value = tensors(16, 4, 32)
    parts = [PACKED.forward_ring_kv_chunk(query, key[cut], value[cut]) for cut in (slice(0, 6), slice(6, 16))]
    merged = merge_attention_states(*zip(*parts, strict=True))
    right, right_lse = reference_attention(query[None], key[None], value[None])
    assert_right(merged, (right[0], right_lse[0]))
    square = PACKED.forward_ring_kv_chunk(query, key, value, causal=True)
    right, right_lse = reference_attention(query[None], key[None], value[None], causal=True)
    assert_right(square, (right[0], right_lse[0]))
    with pytest.raises(UnsupportedAttentionError, match="top-left"):
        PACKED.forward_ring_kv_chunk(query, key[:6], value[:6], causal=True)


@pytest.mark.parametrize("name", ["packed_attention", "fused_attention"])
def test_the_simulated_functions_are_the_vendor_s(name):
    simulated = getattr(simulated_kernels(math.nan), name)
    assert inspect.signature(simulated) == inspect.signature(getattr(kernels, name))


@pytest.mark.parametrize("text", ["acme1,empty_lse=inf", "empty_lse=0", None])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (1, 0)}, {"sinks": torch.ones(4)}], ids=str)
def test_whatever_the_kernel_writes_for_rows_without_keys_the_answer_is_one(text, options):
    query, key, value = (
        torch.randn(1, length, heads, dim, generator=torch.Generator().manual_seed(length + dim)).half()
        for length, heads, dim in ((5, 4, 20), (3, 2, 20), (3, 2, 12))
    )
    fused = SimulatedAcme.parse(text).backends()[0]
    found = fused.forward(query, key, value, return_lse=True, **options)
    assert_right(found, reference_attention(query, key, value, **options), 2e-3)
