"""The vendor's own call, made again: it gives what the backend gives, and nothing of ours is called."""

import pytest
import torch

from hal_attn import PackedSequences, attention, explain, varlen_attention
from hal_attn.bench.vendor import output_of, vendor_call

LENGTHS = [5, 3]


def tensors(packed, dtype, grad=False):
    generator = torch.Generator().manual_seed(0)
    rows = (8,) if packed else (1, 8)
    made = (torch.randn(*rows, heads, 64, generator=generator).to(dtype) for heads in (4, 2, 2))
    return tuple(tensor.requires_grad_(grad) for tensor in made)


def found(packed, dtype, grad=False):
    """(backend, its vendor's call or None, our output, the inputs) for each backend that takes the call."""
    inputs = tensors(packed, dtype, grad)
    sequences = PackedSequences.from_lengths(LENGTHS) if packed else None
    options = {"sequences": sequences} if packed else {}
    selection = explain(*inputs, causal=True, **options)
    for backend, refusals in selection.considered:
        if not refusals:
            call = vendor_call(backend, selection.request, *inputs, sequences)
            function = varlen_attention if packed else attention
            yield backend, call, function(*inputs, causal=True, backend=backend.name, **options), inputs


def as_ours(output, ours):
    """The vendor's layout, `[B, S, H, D]`, `[B, H, S, D]` or packed, as ours."""
    if output.shape != ours.shape and output.dim() == ours.dim() + 1:
        output = output[0]
    return output if output.shape == ours.shape else output.transpose(-2, -3)


@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
@pytest.mark.parametrize("vendor", ["cuda", "rocm", "ascend"])
def test_it_is_the_one_call_of_every_backend_on_the_frame(vendor, packed, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", vendor)
    names = set()
    for backend, call, ours, _ in found(packed, torch.bfloat16):
        if call is not None:
            names.add(backend.name)
            assert torch.equal(as_ours(output_of(call()), ours), ours), backend.name
    wanted = {
        "cuda": {"flash_attn_3", "flash_attn_4", "flash_attn", "torch_flash", "torch_efficient"},
        "rocm": {"aiter", "aiter_triton", "flash_attn", "torch_flash", "torch_efficient"},
        "ascend": {"ascend_fa"},
    }
    assert wanted[vendor] <= names
    assert ("torch_cudnn" in names) == (vendor == "cuda" and not packed)


def test_the_cpus_operator_is_found_below_pytorch():
    calls = {backend.name: (call, ours) for backend, call, ours, _ in found(False, torch.float32)}
    for name in ("cpu_flash", "cpu_sdpa"):
        call, ours = calls[name]
        assert "flash_attention_for_cpu" in str(call.function)
        torch.testing.assert_close(as_ours(output_of(call()), ours), ours)
    assert calls["cpu_math"][0] is None


def test_what_the_padded_route_serves_has_no_one_call():
    assert [call for _, call, _, _ in found(True, torch.float32)] == [None, None, None]


def test_its_gradients_are_those_of_the_call():
    for backend, call, ours, inputs in found(False, torch.float32, grad=True):
        if backend.name == "cpu_flash":
            again, leaves = call.with_gradients()
            output = output_of(again())
            mine = torch.autograd.grad(output, leaves, torch.ones_like(output))
            theirs = torch.autograd.grad(ours, inputs, torch.ones_like(ours))
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one.transpose(1, 2), other)


def test_the_backend_keeps_its_own_library(monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "ascend")
    ((backend, _, _, _), *_) = found(False, torch.bfloat16)
    before = backend.library
    list(found(False, torch.bfloat16))
    assert backend.library is before
