"""The hooks of a backend: one written for another runtime ports as it is, and one that leaves a hook out says so."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hal_attn_cpu.platform import CpuPlatform

from hal_attn import (
    PackedSequences,
    UnsupportedAttentionError,
    attention,
    explain,
    reference_varlen_attention,
    run_padded_attention,
    select_backend,
    varlen_attention,
)
from hal_attn.refusal import Refusal
from tests.fakes import (
    ABSENT,
    FLOAT32,
    BatchedFake,
    FakeBackend,
    FakePlatform,
    PackedFake,
    SGLangFake,
    claims,
    fresh,  # noqa: F401
    install,
    on_the_cpu,
)
from tests.support import assert_right, dense, packed


def test_a_backend_written_for_sglang_ports_as_it_is(monkeypatch):
    backend = SGLangFake("ported", FLOAT32)
    on_the_cpu(monkeypatch, backend)
    query, key, value, sequences = packed([3, 1, 4])
    want = varlen_attention(query, key, value, sequences=sequences, backend=("ported",))
    offsets = torch.tensor([0, 3, 4, 8])
    got = varlen_attention(query, key, value, cu_seqlens=offsets, max_seqlen=4, cu_seqlens_host=[0, 3, 4, 8])
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for call in backend.calls:
        assert call["cu_seqlens"].tolist() == [0, 3, 4, 8]
        assert call["cu_seqlens"].dtype == torch.int32
        assert call["max_seqlen"] == 4
        assert tuple(call["cu_seqlens_host"]) == (0, 3, 4, 8)
    assert len(backend.calls) == 2
    install(monkeypatch, CpuPlatform())
    right = varlen_attention(query, key, value, sequences=sequences, backend="cpu_math")
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.5}, {"causal": True}, {"return_lse": True}, {"softcap": 1.0}, {"deterministic": True}],
    ids=lambda options: next(iter(options)),
)
def test_a_minimal_backend_never_meets_an_option_that_it_has_no_parameter_for(options, monkeypatch):
    ported, spare = SGLangFake("ported", FLOAT32), BatchedFake("spare")
    on_the_cpu(monkeypatch, ported, spare)
    query, key, value, sequences = packed([3, 1, 4])
    assert explain(query, key, value, sequences=sequences, **options).chosen.name == "spare"
    varlen_attention(query, key, value, sequences=sequences, **options)
    assert (len(ported.calls), bool(spare.calls)) == (0, True)


def test_a_minimal_backend_never_meets_key_lengths_that_it_has_no_parameter_for(monkeypatch):
    ported, spare = SGLangFake("ported", FLOAT32), BatchedFake("spare")
    on_the_cpu(monkeypatch, ported, spare)
    query, key, value, sequences = packed([3, 1, 4], [2, 2, 4])
    varlen_attention(query, key, value, sequences=sequences)
    assert (len(ported.calls), bool(spare.calls)) == (0, True)


def test_empty_sequences_never_reach_a_packed_backend(monkeypatch):
    ported = SGLangFake("ported", FLOAT32)
    on_the_cpu(monkeypatch, ported)
    query, key, value, sequences = packed([0, 3, 0, 2, 0])
    output = varlen_attention(query, key, value, sequences=sequences)
    (call,) = ported.calls
    assert call["cu_seqlens"].tolist() == [0, 3, 5]
    whole = varlen_attention(query, key, value, sequences=PackedSequences.from_lengths([3, 2]))
    torch.testing.assert_close(output, whole, rtol=0, atol=0)


def test_attention_passes_over_a_backend_of_packed_calls_only(monkeypatch):
    on_the_cpu(monkeypatch, SGLangFake("packed_only", FLOAT32))
    query, key, value = dense()
    with suppress(UnsupportedAttentionError):
        output = attention(query, key, value)
        install(monkeypatch, CpuPlatform())
        torch.testing.assert_close(output, attention(query, key, value), rtol=1e-5, atol=1e-6)


def test_attention_chooses_a_backend_that_has_the_hook(monkeypatch):
    on_the_cpu(monkeypatch, FakeBackend("hollow"), SGLangFake("packed_only", FLOAT32), BatchedFake("batched"))
    attention(*dense())
    assert select_backend(*dense()).name in ("packed_only", "batched")


def test_no_call_hits_a_backend_without_any_hook(monkeypatch):
    on_the_cpu(monkeypatch, FakeBackend("hollow"), BatchedFake("spare"))
    query, key, value, sequences = packed([3, 2])
    attention(*dense())
    varlen_attention(query, key, value, sequences=sequences)
    with pytest.raises(UnsupportedAttentionError):
        attention(*dense(), backend="hollow")


@pytest.mark.parametrize(
    ("hook", "what"),
    [("forward", "batched"), ("forward_varlen", "packed varlen"), ("forward_ring_kv_chunk", "ring KV-chunk")],
)
def test_a_hook_that_is_left_out_names_the_class_and_who_has_it(hook, what, monkeypatch):
    has = {"forward": ["batched", "cpu_flash", "cpu_sdpa", "cpu_math"], "forward_varlen": ["ported"]}
    has["forward_ring_kv_chunk"] = ["ported", "cpu_flash", "cpu_sdpa", "cpu_math"]
    gone = SGLangFake("gone", missing=Refusal("installed", "nothing", "vendorlib"))
    far = FakePlatform("far", SGLangFake("far"), BatchedFake("far_too"), device_type="npu", detects=ABSENT)
    near = FakePlatform("near", BatchedFake("batched"), SGLangFake("ported"), gone, device_type="meta")
    install(monkeypatch, far, near, CpuPlatform())

    class Bare(FakeBackend):
        pass

    bare = Bare("bare")
    assert not bare.implements(hook)
    query, key, value, sequences = packed([3, 2])
    offsets = {"cu_seqlens": sequences.cu_seqlens, "max_seqlen": 3} if hook == "forward_varlen" else {}
    with pytest.raises(NotImplementedError) as caught:
        getattr(bare, hook)(query, key, value, **offsets)
    first, second = str(caught.value).split("\n")
    assert first == f"Bare does not implement {what} attention"
    assert second == f"backends here that do: {', '.join(has[hook])}"


def test_a_hook_that_nobody_has(monkeypatch):
    install(monkeypatch, FakePlatform("fake", FakeBackend("bare")))
    with pytest.raises(NotImplementedError, match=r"\nbackends here that do: none$"):
        FakeBackend("bare").forward_ring_kv_chunk(*packed([3])[:3])


def test_implements():
    found = {hook: [kind("x").implements(hook) for kind in (FakeBackend, BatchedFake, SGLangFake)] for hook in HOOKS}
    assert found == {
        "forward": [False, True, False],
        "forward_varlen": [False, False, True],
        "forward_ring_kv_chunk": [False, False, True],
    }
    with pytest.raises(ValueError, match="hook: got 'backward'; allowed: forward, forward_varlen"):
        FakeBackend("x").implements("backward")


HOOKS = ("forward", "forward_varlen", "forward_ring_kv_chunk")


@pytest.mark.parametrize("padding", [True, False])
def test_a_batched_only_backend_serves_packed_calls(padding, monkeypatch):
    backend = BatchedFake("batched", claims(key_padding_mask=padding))
    on_the_cpu(monkeypatch, backend)
    query, key, value, sequences = packed([3, 1, 0, 4, 3], [2, 2, 3, 5, 2])
    output, lse = varlen_attention(query, key, value, sequences=sequences, window_size=(2, 1), return_lse=True)
    assert backend.calls
    assert padding or not any("key_padding_mask" in call for call in backend.calls)
    again = run_padded_attention(backend, query, key, value, sequences, window_size=(2, 1), return_lse=True)
    install(monkeypatch, CpuPlatform())
    want = varlen_attention(query, key, value, sequences=sequences, window_size=(2, 1), return_lse=True)
    for got in ((output, lse), again):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_metadata_is_built_once_a_batch_and_shared_by_layers(monkeypatch):
    backend = PackedFake("planned")
    on_the_cpu(monkeypatch, backend)
    for batch, lengths in enumerate(([3, 2], [3, 2], [1, 0, 4]), start=1):
        query, key, value, sequences = packed(lengths)
        for _ in range(4):
            varlen_attention(query, key, value, sequences=sequences)
        assert backend.builder.built == batch
        made = {id(call["metadata"]) for call in backend.calls[-4:]}
        assert len(made) == 1
        assert len(backend.calls) == 4 * batch


def test_every_backend_has_a_metadata_builder(monkeypatch):
    query, key, value, sequences = packed([3, 2])
    for backend in (*CpuPlatform().backends(), BatchedFake("batched"), SGLangFake("ported")):
        install(monkeypatch, FakePlatform("fake", backend))
        request = explain(query, key, value, sequences=sequences).request
        metadata = backend.metadata_builder().build(sequences, request)
        assert metadata.sequences is sequences
        assert metadata.device == query.device


@pytest.mark.parametrize(
    ("device", "name", "options", "rule"),
    [
        ("cuda:sm90", "torch_cudnn", {"window_size": (2, 1)}, "window_size"),
        ("cuda:sm90", "torch_efficient", {"window_size": (-1, 2)}, "window_size"),
        ("cuda:sm90", "flash_attn", {"mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, "mask"),
        ("rocm:gfx942", "aiter", {"softcap": 1.0, "dropout_p": 0.2}, "softcap"),
        ("ascend", "ascend_fa", {"softcap": 1.0}, "softcap"),
    ],
)
def test_a_vendor_s_hook_called_by_hand_refuses_what_it_would_drop(monkeypatch, device, name, options, rule):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", device)
    tensors = dense(1, 5, head_dim=64, dtype=torch.float16)
    backend = next(c.backend for c in explain(*tensors).considered if c.backend.name == name)
    with pytest.raises(UnsupportedAttentionError) as caught:
        backend.forward(*tensors, **options)
    assert rule in {refusal.rule for _, refusals in caught.value.refusals for refusal in refusals}


def test_a_vendor_s_packed_hook_called_by_hand_takes_offsets_as_they_come(monkeypatch):
    """int64 offsets, a maximum as a tensor, an open edge as None: what `varlen_attention` takes, the hook takes."""
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda:sm90")
    *tensors, sequences = packed([5, 3], head_dim=64, dtype=torch.float16)
    backend = next(
        c.backend for c in explain(*tensors, sequences=sequences).considered if c.backend.name == "flash_attn"
    )
    offsets = torch.tensor([0, 5, 8])
    found = backend.forward_varlen(
        *tensors, cu_seqlens=offsets, max_seqlen=torch.tensor(5), window_size=(None, 0), return_lse=True
    )
    right = varlen_attention(*tensors, sequences=sequences, causal=True, return_lse=True, backend="flash_attn")
    assert all(torch.equal(have, want) for have, want in zip(found, right, strict=True))


@pytest.mark.parametrize("lengths", [[4, 4, 4], [5]], ids=["several", "one"])
def test_equal_sequences_with_the_lse_on_a_kernel_of_batches(monkeypatch, lengths):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda:sm90")
    *tensors, sequences = packed(lengths, head_dim=64, dtype=torch.float16)
    output, lse = varlen_attention(*tensors, sequences=sequences, return_lse=True, backend="torch_cudnn")
    right, right_lse = reference_varlen_attention(*tensors, sequences)
    torch.testing.assert_close(output.double(), right, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), right_lse, rtol=2e-3, atol=2e-3)


def test_a_sink_of_minus_infinity_is_none(monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda:sm90")
    tensors = dense(1, 6, 3, heads=2, head_dim=16, dtype=torch.float16)
    sinks = torch.tensor([-torch.inf, 1.0])
    assert "flash_attn" in assert_right(*tensors, causal=True, sinks=sinks, gradients=False)
