"""What AMD's libraries get wrong or leave unread, shown on the simulated functions; no call of ours meets it."""

import math

import pytest
import torch
from hal_attn_rocm.aiter import AiterBackend
from hal_attn_rocm.simulated.aiter import SimulatedAiter
from hal_attn_rocm.simulated.aiter_triton import SimulatedAiterTriton
from hal_attn_rocm.simulated.flash_attn import simulated_rocm_flash_attn

from hal_attn import PackedSequences, UnsupportedAttentionError, attention, varlen_attention
from tests.support import assert_right, dense, packed
from tests.vendors.signatures import bind

BF16 = {"heads": 2, "head_dim": 128, "dtype": torch.bfloat16}
HALF = {"heads": 2, "head_dim": 64, "dtype": torch.float16}


def packed_arguments(lengths, lengths_k=None, **shape):
    query, key, value, sequences = packed(lengths, lengths_k, **shape)
    offsets, offsets_k = sequences.offsets(query.device)
    return (query, key, value, offsets, offsets_k, sequences.max_seqlen, sequences.max_seqlen_k)


def with_gradients(tensors):
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("generation", ["gfx942", "gfx950"])
def test_assembly_ignores_softcap(generation, simulate):
    library = SimulatedAiter(generation)
    arguments = packed_arguments([5, 7], **BF16)
    plain = library.flash_attn_varlen_func(*arguments)
    assert torch.equal(library.flash_attn_varlen_func(*arguments, logits_soft_cap=0.5), plain)
    half = tuple(tensor.half() for tensor in arguments[:3]) + arguments[3:]
    assert not torch.equal(
        library.flash_attn_varlen_func(*half, logits_soft_cap=0.5), library.flash_attn_varlen_func(*half)
    )
    simulate(generation)
    query, key, value, sequences = packed([5, 7], **BF16)
    assert "aiter" in assert_right(query, key, value, sequences=sequences, softcap=0.5, gradients=False)


def test_the_backward_pass_leaves_softcap_out(simulate, refusals):
    library = SimulatedAiter("gfx942")
    query, key, value, *rest = packed_arguments([5, 7], **HALF)
    key.requires_grad_()
    gradients = [
        torch.autograd.grad(
            library.flash_attn_varlen_func(query, key, value, *rest, return_lse=True, logits_soft_cap=cap)[0].sum(), key
        )[0]
        for cap in (0.0, 0.5)
    ]
    assert torch.equal(*gradients)
    simulate("gfx942")
    query, key, value, sequences = packed([5, 7], **HALF)
    query.requires_grad_()
    assert "backward" in refusals("aiter", query, key, value, sequences=sequences, softcap=0.5)["gradients"]
    backend = AiterBackend(lambda: library, lambda device: "gfx942")
    with pytest.raises(UnsupportedAttentionError, match="softcap"):
        backend.forward(*with_gradients(dense(**HALF)), softcap=0.5)


@pytest.mark.parametrize(
    ("generation", "options"),
    [
        ("gfx90a", {}),
        ("gfx90a", {"causal": True}),
        ("gfx942", {"window_size": (0, 0)}),
        ("gfx942", {"window_size": (0, -1)}),
        ("gfx950", {"window_size": (0, 0)}),
    ],
)
def test_assembly_is_taken_where_it_has_no_kernel(generation, options):
    with pytest.raises(RuntimeError, match="invalid argument for fmha_fwd"):
        SimulatedAiter(generation).flash_attn_varlen_func(*packed_arguments([5, 7], **BF16), **options)
    with pytest.raises(RuntimeError, match="invalid argument for fmha_fwd"):
        SimulatedAiter(generation).flash_attn_func(*dense(1, 130, **BF16), **options)


@pytest.mark.parametrize(
    ("generation", "options", "shape"),
    [
        ("gfx90a", {}, BF16),
        ("gfx90a", {"causal": True}, BF16),
        ("gfx942", {"window_size": (0, 0)}, BF16),
        ("gfx942", {"window_size": (0, -1)}, BF16),
        ("gfx942", {"window_size": (0, 0)}, HALF),
        ("gfx942", {"causal": True}, HALF),
        ("gfx950", {"causal": True}, BF16),
        ("gfx950", {"window_size": (3, 1)}, {**HALF, "head_dim": 96}),
    ],
)
def test_right_calls_would_go_wrong_without_the_way_around_assembly(monkeypatch, simulate, generation, options, shape):
    """The calls that `_assembly_fails` knows: right with it, an error or wrong gradients without."""
    simulate(generation)
    call = dense(1, 134, 130, **shape)
    assert "aiter" in assert_right(*call, **options)
    monkeypatch.setattr(AiterBackend, "_assembly_fails", lambda *arguments: False)
    with pytest.raises((RuntimeError, AssertionError), match=r"invalid argument|gradient of"):
        assert_right(*call, **options)


def test_gradients_need_the_lse(simulate):
    library = SimulatedAiter("gfx942")
    arguments = packed_arguments([5, 7], **HALF)
    with pytest.raises(AssertionError):
        library.flash_attn_func(*with_gradients(dense(**HALF)))
    with pytest.raises(AssertionError):
        library.flash_attn_varlen_func(*with_gradients(arguments[:3]), *arguments[3:])
    simulate("gfx942")
    output = attention(*with_gradients(dense(**HALF)), backend="aiter")
    assert output.requires_grad


def test_min_seqlen_q_leaves_short_sequences_out(simulate):
    arguments = packed_arguments([5, 1, 7], **HALF)
    output = SimulatedAiter("gfx942").flash_attn_varlen_func(*arguments, min_seqlen_q=1)
    assert output[5].isnan().all()
    assert output[6:].isfinite().all()
    simulate("gfx942")
    output = varlen_attention(*arguments[:3], sequences=PackedSequences.from_lengths([5, 1, 7]), backend="aiter")
    assert output.isfinite().all()


@pytest.mark.parametrize("backend", ["aiter", "flash_attn"])
def test_a_right_edge_beyond_the_keys_is_taken_as_unlimited(simulate, refusals, backend):
    library = SimulatedAiter("gfx942")
    query, key, value = dense(1, 9, 3, **HALF)
    unlimited = library.flash_attn_func(query, key, value)
    assert torch.equal(library.flash_attn_func(query, key, value, window_size=(-1, 3)), unlimited)
    simulate("gfx942")
    assert "below the key length" in refusals(backend, query, key, value, window_size=(-1, 3))["window_size"]
    assert not refusals(backend, query, key, value, window_size=(-1, 2))
    assert backend not in assert_right(query, key, value, window_size=(-1, 3))
    assert backend in assert_right(query, key, value, window_size=(-1, 2))


def test_a_right_edge_beyond_the_keys_of_a_packed_call(simulate):
    """Sequences without queries are left out before the call, so the longest keys are not those of the request."""
    simulate("gfx942")
    for lengths, lengths_k in (([9, 4], [3, 5]), ([9, 0], [3, 20])):
        query, key, value, sequences = packed(lengths, lengths_k, **HALF)
        for right in (1, 3, 4, 7):
            options = {"sequences": sequences, "window_size": (-1, right)}
            assert {"aiter", "flash_attn"} <= set(assert_right(query, key, value, **options))
    query, key, value, sequences = packed([9, 4], **HALF)
    assert "flash_attn" in assert_right(query, key, value, sequences=sequences, window_size=(-1, 3))


def test_triton_lays_the_packed_lse_out_by_token_and_writes_0_for_rows_without_keys(simulate):
    arguments = packed_arguments([5, 2], [3, 2], **HALF)
    _, lse = SimulatedAiterTriton("gfx942").flash_attn_varlen_func(*arguments, causal=True, return_lse=True)
    assert lse.shape == (7, 2)
    assert not lse[:2].any()
    simulate("gfx942")
    sequences = PackedSequences.from_lengths([5, 2], [3, 2])
    _, lse = varlen_attention(*arguments[:3], sequences=sequences, causal=True, return_lse=True, backend="aiter_triton")
    assert lse.shape == (2, 7)
    assert torch.isneginf(lse[:, :2]).all()


def test_triton_refuses_windows_biases_and_plain_slopes():
    library = SimulatedAiterTriton("gfx942")
    query, key, value = dense(1, 5, **HALF)
    with pytest.raises(ValueError, match="Sliding Window"):
        library.flash_attn_func(query, key, value, window_size=(2, 0))
    with pytest.raises(ValueError, match="Bias"):
        library.flash_attn_varlen_func(*packed_arguments([5], **HALF), bias=torch.zeros(5, 5))
    with pytest.raises(IndexError):
        library.flash_attn_func(query, key, value, alibi_slopes=torch.ones(2))
    with pytest.raises(KeyError, match="gfx90a"):
        SimulatedAiterTriton("gfx90a").flash_attn_func(query, key, value)


def test_triton_gives_gradients_of_the_head_dim_that_it_padded_to(simulate):
    inputs = with_gradients(dense(1, 5, heads=2, head_dim=20, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="invalid shape"):
        SimulatedAiterTriton("gfx942").flash_attn_func(*inputs).sum().backward()
    simulate("gfx942")
    assert "aiter_triton" in assert_right(*dense(1, 5, heads=2, head_dim=20, dtype=torch.float16))


@pytest.mark.parametrize(
    ("kernels", "options"),
    [
        ("ck", {"softcap": 0.5}),
        ("triton", {"softcap": 0.5}),
        ("triton", {"window_size": (1, 0)}),
    ],
)
def test_flash_attn_for_rocm_leaves_options_unread(simulate, refusals, kernels, options):
    library = simulated_rocm_flash_attn(kernels)
    query, key, value = dense(1, 5, **HALF)
    assert torch.equal(
        library.flash_attn_func(query, key, value, **options), library.flash_attn_func(query, key, value)
    )
    simulate(f"gfx942,flash_attn={kernels}")
    assert refusals("flash_attn", query, key, value, **options).keys() == options.keys()


def test_flash_attn_that_turns_out_to_run_over_triton_refuses_what_it_leaves_unread(simulate):
    platform = simulate("gfx942,flash_attn=triton")
    backend = next(backend for backend in platform.backends() if backend.name == "flash_attn")
    for options in ({"window_size": (1, 0)}, {"dropout_p": 0.1}, {"deterministic": True}):
        with pytest.raises(UnsupportedAttentionError, match="Triton"):
            backend.unchecked("forward")(*dense(1, 5, **HALF), **options)


class Recorder:
    """A library whose calls are bound to the vendor's signatures, and kept."""

    def __init__(self, library, prefix):
        self.library, self.prefix, self.calls = library, prefix, []

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*args, **kwargs):
            assert len(args) == 3, "all but query, key and value goes by keyword"
            bound = bind(f"{self.prefix}.{name}", args, kwargs)
            self.calls.append((name, bound.arguments))
            return function(*args, **kwargs)

        return call


@pytest.fixture
def recorded():
    recorder = Recorder(SimulatedAiter("gfx942"), "aiter")
    return AiterBackend(lambda: recorder, lambda device: "gfx942"), recorder.calls


def test_calls_say_what_the_vendor_would_choose_otherwise(recorded):
    """The scale is that of the head dim passed, rounding to nearest even, and determinism as asked."""
    backend, calls = recorded
    backend.forward(*dense(1, 5, heads=2, head_dim=20, dtype=torch.float16))
    sequences = PackedSequences.from_lengths([5, 7])
    query, key, value, _ = packed([5, 7], heads=2, head_dim=20, dtype=torch.float16)
    offsets = {"cu_seqlens": sequences.offsets(query.device)[0], "max_seqlen": 7, "cu_seqlens_host": (0, 5, 12)}
    backend.forward_varlen(query, key, value, **offsets, deterministic=True)
    backend.forward_varlen(query, key, value, **offsets, softcap=0.5)
    names = [name for name, _ in calls]
    assert names == ["flash_attn_func", "flash_attn_varlen_func", "mha_varlen_fwd"]
    for _, arguments in calls:
        assert math.isclose(arguments["softmax_scale"], 20**-0.5)
        assert arguments["q"].shape[-1] == 24
    for (_, arguments), deterministic in zip(calls[:2], (False, True), strict=True):
        assert arguments["how_v3_bf16_cvt"] == 0
        assert arguments["deterministic"] is deterministic
        assert arguments["return_lse"] is False
    assert calls[1][1]["min_seqlen_q"] == calls[2][1]["min_seqlen_q"] == 0


def test_slopes_of_0_are_given_only_where_assembly_fails(recorded):
    backend, calls = recorded
    backend.forward(*dense(1, 130, **BF16), causal=True)
    backend.forward(*dense(1, 130, **BF16), window_size=(3, 0))
    backend.forward(*dense(1, 130, **BF16), window_size=(0, 0))
    backend.forward(*with_gradients(dense(1, 130, 140, **BF16)), causal=True)
    given = [arguments["alibi_slopes"] for _, arguments in calls]
    assert [slopes is not None for slopes in given] == [False, False, True, True]
    assert not any(slopes.any() for slopes in given[2:])
