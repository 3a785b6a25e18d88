"""Errors as a person meets them: their classes, short messages whatever was given, and reasons as data."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hal_attn import (
    BackendNotAvailableError,
    ConfigurationError,
    HalAttnError,
    InvalidAttentionInputError,
    Refusal,
    UnsupportedAttentionError,
    attention,
    explain,
    varlen_attention,
)
from tests.fakes import BatchedFake, FakePlatform, claims, fresh, install, on_the_cpu, refused  # noqa: F401
from tests.support import dense, packed

LONG = 10_000
REASON = (("one", (Refusal("softcap", "1.0", "off"), Refusal("window_size", "(1, 2)", "no window", "leave it out"))),)


def _sent(error):
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (InvalidAttentionInputError, ValueError),
        (UnsupportedAttentionError, NotImplementedError),
        (BackendNotAvailableError, RuntimeError),
        (ConfigurationError, ValueError),
    ],
)
def test_each_error_is_one_of_ours_and_a_builtin_one(error, builtin):
    assert issubclass(error, HalAttnError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize(
    "error",
    [
        InvalidAttentionInputError("scale", "nan", "a finite number", "leave it out"),
        UnsupportedAttentionError("no backend takes this call", REASON),
        BackendNotAvailableError("not here", REASON),
        ConfigurationError("HAL_ATTN_FALLBACK: got 'x'"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    "through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"]
)
def test_an_error_survives_the_way_between_processes(error, through):
    arrived = through(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


# a large wrong value -> the argument
LARGE = {
    "causal": {"causal": torch.ones(LONG, dtype=torch.bool)},
    "return_lse": {"return_lse": torch.ones(LONG)},
    "window_size": {"window_size": torch.arange(LONG)},
    "window_size list": {"window_size": list(range(LONG))},
    "backend": {"backend": [None] * LONG},
    "scale": {"scale": [1.0] * LONG},
    "softcap": {"softcap": "1" * LONG},
    "mask": {"mask": [[True] * LONG]},
    "sinks": {"sinks": [0.0] * LONG},
}


@pytest.mark.parametrize("case", LARGE)
def test_a_large_wrong_value_is_not_poured_out(case):
    message = refused(case.split()[0], "", attention, *dense(), **LARGE[case])
    assert len(message) < 600
    assert "\n" not in message


def test_long_offsets_are_not_poured_out():
    query, key, value, _ = packed([1])
    offsets = torch.arange(1, LONG)
    assert len(refused("cu_seqlens", "1, 2, 3", varlen_attention, query, key, value, cu_seqlens=offsets)) < 600
    host = [0, *range(LONG), 0.5]
    options = {"cu_seqlens": torch.tensor([0, 1]), "cu_seqlens_host": host}
    assert len(refused("cu_seqlens_host", "0.5", varlen_attention, query, key, value, **options)) < 600


def test_a_wrong_value_says_what_to_do():
    query, key, value = dense()
    for wrong, remedy in [
        ((query, key.double(), value), "convert with key.to(query.dtype)"),
        ((query, key.to("meta"), value), "move it with key.to(query.device)"),
        ((query, key[:, :, :3], value[:, :, :3]), "query head h reads key head h // (H // Hkv)"),
        ((query[0], key, value), "varlen_attention takes packed [T, H, D]"),
    ]:
        with pytest.raises(InvalidAttentionInputError) as caught:
            attention(*wrong)
        assert str(caught.value).endswith(f". {remedy}")


def test_a_refusal_reads_as_one_line():
    assert str(Refusal("softcap", "1.0", "off")) == "softcap: have 1.0, need off"
    assert str(REASON[0][1][1]) == "window_size: have (1, 2), need no window (leave it out)"


def test_an_unsupported_call_is_described_with_every_reason():
    assert str(UnsupportedAttentionError("no backend takes this call", REASON)) == (
        "no backend takes this call\n"
        "  one:\n"
        "    - softcap: have 1.0, need off\n"
        "    - window_size: have (1, 2), need no window (leave it out)"
    )


def test_an_unsupported_call_says_what_it_asked_for_and_what_to_change(monkeypatch):
    install(monkeypatch, FakePlatform("fake", BatchedFake("one", claims(softcap=False)), BatchedFake("two", claims())))
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "two")
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(*dense(2, 5, 7, kv_heads=2), softcap=1.5)
    first, *reasons = str(caught.value).splitlines()
    assert "batch 2, 5 queries, 7 keys, 4/2 heads, dim 16, float32, cpu, softcap=1.5" in first
    assert "by the default order of fake; change what the rules below name" in first
    assert reasons == [
        "  one:",
        "    - softcap: have 1.5, need off",
        "  two:",
        "    - disabled: have HAL_ATTN_DISABLED_BACKENDS names it, need a backend that is not disabled",
    ]
    assert caught.value.refusals == tuple((b.name, reasons) for b, reasons in explain(*dense(), softcap=1.5).considered)


def test_every_refusal_says_what_it_has_and_needs(monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("one", claims(dtypes=frozenset(), head_dim_multiple=32, max_head_dim=8)))
    considered = explain(*dense(), softcap=1.0).considered
    refusals = considered[0].refusals
    assert [refusal.rule for refusal in refusals] == [
        "dtype",
        "head_dim",
        "head_dim",
        "value_head_dim",
        "value_head_dim",
    ]
    assert all(refusal.have and refusal.need for refusal in refusals)


def test_a_selection_is_a_table(monkeypatch):
    install(monkeypatch, FakePlatform("fake", BatchedFake("plain", claims(softcap=False)), BatchedFake("capped_one")))
    assert str(explain(*dense(1, 3), softcap=1.0)).splitlines() == [
        "request   batch 1, 3 queries, 3 keys, 4 heads, dim 16, float32, cpu, softcap=1.0",
        "platform  fake",
        "chosen    capped_one, by the default order of fake",
        "  plain       refused",
        "                - softcap: have 1.0, need off",
        "  capped_one  chosen",
    ]


def test_an_error_hides_no_error_behind_it():
    with pytest.raises(InvalidAttentionInputError) as caught:
        attention(*dense(), window_size=3)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
