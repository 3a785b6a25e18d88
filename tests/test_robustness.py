"""Faults that only show in a certain order or place: each of these gave wrong values or an error once."""

import sys
import threading

import pytest
import torch
from hal_attn_cpu.platform import CpuPlatform

from hal_attn import (
    PackedSequences,
    UnsupportedAttentionError,
    attention,
    memo,
    merge_attention_states,
    reference_attention,
    reference_varlen_attention,
    run_padded_attention,
    select_backend,
    varlen_attention,
)
from tests.support import CPU_BACKENDS, dense, packed

BACKENDS = {backend.name: backend for backend in CpuPlatform().backends()}


def close(got, exact):
    torch.testing.assert_close(got.double(), exact.double(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("empty", [(0, 4), (4, 0), (0, 0)], ids=["no queries", "no keys", "neither"])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "between", "last"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_empty_sequence_among_equal_ones_changes_nothing(backend, empty, place, count):
    pairs = [(3, 5)] * count
    pairs.insert(min(place, count), empty)
    query, key, value, sequences = packed(*zip(*pairs, strict=True), head_dim=8)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    output = varlen_attention(query, key, value, sequences=sequences, backend=backend)
    exact, _ = reference_varlen_attention(query, key, value, sequences)
    close(output, exact)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad((output * weight).sum(), (query, key, value))
    for got, want in zip(found, torch.autograd.grad((exact * weight).sum(), (query, key, value)), strict=True):
        close(got, want)


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 0.3}], ids=str)
def test_ring_chunks_merge_to_the_whole(name, options):
    query, key, value = (tensor[0] for tensor in dense(1, 6, 6, kv_heads=2))
    # Causal on the diagonal chunk alone; the earlier keys are seen by every query.
    early, late = slice(0, 4), slice(4, 10)
    early_key, early_value = (torch.randn(10, 2, 16, generator=torch.Generator().manual_seed(n)) for n in range(2))
    early_key[late], early_value[late] = key, value
    past = {name: value for name, value in options.items() if name != "causal"}
    backend = BACKENDS[name]
    parts = [
        backend.forward_ring_kv_chunk(query, early_key[early], early_value[early], **past),
        backend.forward_ring_kv_chunk(query, early_key[late], early_value[late], **options),
    ]
    output, lse = merge_attention_states(*zip(*parts, strict=True))
    exact, exact_lse = reference_attention(query[None], early_key[None], early_value[None], **options)
    close(output, exact[0])
    close(lse, exact_lse[0])


@pytest.mark.parametrize("name", CPU_BACKENDS)
def test_a_packed_ring_chunk(name):
    query, key, value, sequences = packed([3, 2], [4, 6], kv_heads=1)
    output, lse = BACKENDS[name].forward_ring_kv_chunk(query, key, value, sequences=sequences)
    exact, exact_lse = reference_varlen_attention(query, key, value, sequences)
    close(output, exact)
    close(lse, exact_lse)


@pytest.mark.parametrize("name", ["cpu_flash", "cpu_sdpa"])
@pytest.mark.parametrize(
    ("lengths_k", "options", "rule"),
    [
        ([3, 3], {"causal": True}, "causal"),
        ([2, 2], {"causal": True, "scale": -1.0}, "scale"),
        ([2, 2], {"softcap": 2.0}, "softcap"),
    ],
    ids=["bottom right", "negative scale", "softcap"],
)
def test_the_padded_route_refuses_what_its_backend_refuses(name, lengths_k, options, rule):
    query, key, value, sequences = packed([2, 2], lengths_k)
    with pytest.raises(UnsupportedAttentionError, match=rule):
        run_padded_attention(BACKENDS[name], query, key, value, sequences, **options)
    query.requires_grad_()
    with pytest.raises(UnsupportedAttentionError, match="return_lse"):
        BACKENDS[name].forward_ring_kv_chunk(query, key, value, sequences=sequences)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_batch_first_used_under_inference_mode_trains_afterwards(backend):
    query, key, value, sequences = packed([3, 1, 2] * 100, heads=1, head_dim=4)
    with torch.inference_mode():
        varlen_attention(query, key, value, sequences=sequences, backend=backend)
    query.requires_grad_()
    varlen_attention(query, key, value, sequences=sequences, backend=backend).sum().backward()
    assert torch.isfinite(query.grad).all()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_autocast_changes_neither_output_nor_gradients(backend):
    query, key, value = (tensor.requires_grad_() for tensor in dense(2, 40))
    exact, _ = reference_attention(query, key, value)
    want = torch.autograd.grad(exact.square().sum(), (query, key, value))
    torch.set_autocast_enabled("cuda", True)
    try:
        attention(query, key, value, backend=backend)
    finally:
        torch.set_autocast_enabled("cuda", False)
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(query, key, value, backend=backend)
        found = torch.autograd.grad(output.double().square().sum(), (query, key, value))
    assert output.dtype == torch.float32
    close(output, exact)
    for got, right in zip(found, want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_the_default_device_changes_nothing():
    query, key, value, _ = packed([5, 2, 2, 7])
    with torch.device("meta"):
        sequences = PackedSequences.from_lengths([5, 2, 2, 7])
        output = varlen_attention(query, key, value, sequences=sequences)
        attention(query[None], key[None], value[None], dropout_p=0.5, backend="cpu_math")
        assert sequences.cu_seqlens.device.type == "cpu"
    close(output, reference_varlen_attention(query, key, value, sequences)[0])


def test_threads_may_fill_the_memo_at_once(monkeypatch):
    monkeypatch.setattr(memo, "_CAPACITY", 4)
    monkeypatch.setattr(memo, "_bind", lambda query, key, value, plain, window, backend, *rest: (backend, plain[0]))
    tensors, failures = dense(1, 2, head_dim=8)[:3], []

    def fill(first):
        try:
            for number in range(1000):
                plain = (float(number % 7), False, 0.0, 0.0, False, False)
                assert memo.bound_call(*tensors, plain, None, first, None) == (first, plain[0])
        except (RuntimeError, AssertionError) as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=fill, args=(str(first),)) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        memo.clear()
    assert not failures


def test_many_hidden_values_that_are_not_finite_cost_no_memory():
    query, key, value = dense(1, 64, 4096, heads=2, head_dim=8)
    hidden = torch.ones(1, 1, 64, 4096, dtype=torch.bool)
    hidden[..., 32:, 2048:] = False
    key[:, 4000:], value[:, 4000:] = torch.nan, torch.inf
    shown = hidden.clone()
    shown[..., 4000:] = False
    output = attention(query, key, value, mask=shown, backend="cpu_math")
    clean = [tensor.nan_to_num(0, 0, 0) for tensor in (query, key, value)]
    close(output, reference_attention(*clean, mask=shown)[0])


@pytest.mark.parametrize("wanted", ["sinks", "alibi_slopes"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["batched", "packed"])
def test_options_of_a_call_without_keys_get_gradients_of_zero(wanted, is_packed):
    option = torch.ones(4, requires_grad=True)
    query, key, value, sequences = packed([3], [0])
    if is_packed:
        output = varlen_attention(query, key, value, sequences=sequences, **{wanted: option})
    else:
        output = attention(query[None], key[None], value[None], **{wanted: option})
    output.sum().backward()
    assert torch.equal(option.grad, torch.zeros(4))


def test_a_sink_of_minus_infinity_on_a_row_without_keys():
    query, key, value = dense(1, 3, 2)
    sinks = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf], requires_grad=True)
    attention(query, key, value, sinks=sinks, causal=True).sum().backward()
    assert torch.isfinite(sinks.grad).all()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_nan_query_without_keys_reaches_no_gradient(backend):
    query, key, value = dense(1, 5)
    query[0, 3] = torch.nan
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    mask[..., 3, :] = False
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = attention(*inputs, mask=mask, backend=backend)
    assert torch.isfinite(output).all()
    for gradient in torch.autograd.grad(output.sum(), inputs):
        assert torch.isfinite(gradient).all()


def test_explain_says_what_a_call_without_keys_does():
    query, key, value = dense(1, 3, 0)
    for call in (attention, select_backend):
        with pytest.raises(UnsupportedAttentionError, match="softcap"):
            call(query, key, value, softcap=2.0, backend="cpu_flash")


def test_offsets_changed_afterwards_do_not_change_the_sequences():
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    sequences = PackedSequences.from_cu_seqlens(offsets)
    offsets[1] = 4
    assert sequences.cu_seqlens.tolist() == list(sequences.cu_seqlens_host) == [0, 2, 5]
