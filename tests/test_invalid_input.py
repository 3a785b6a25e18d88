"""Wrong tensors and options: each is refused by name, with its value and what is allowed, each time it is given."""

from __future__ import annotations

import pytest
import torch

from hal_attn import (
    ConfigurationError,
    attention,
    explain,
    select_backend,
    varlen_attention,
)
from tests.fakes import fresh, refused  # noqa: F401
from tests.support import dense, packed

NAN, INF = float("nan"), float("inf")
OFFSETS = torch.tensor([0, 6, 10])


# what was wrong -> the argument, what the message says it was, the wrong options
PLAIN = {
    "scale nan": ("scale", "nan", {"scale": NAN}),
    "scale inf": ("scale", "inf", {"scale": INF}),
    "scale bool": ("scale", "True", {"scale": True}),
    "scale text": ("scale", "'1'", {"scale": "1"}),
    "scale tensor": ("scale", "a Tensor", {"scale": torch.tensor(0.5)}),
    "causal number": ("causal", "1", {"causal": 1}),
    "causal none": ("causal", "None", {"causal": None}),
    "causal tensor": ("causal", "tensor", {"causal": torch.tensor(True)}),
    "window negative": ("window_size", "(-2, 0)", {"window_size": (-2, 0)}),
    "window float": ("window_size", "(3.0, 0)", {"window_size": (3.0, 0)}),
    "window nan": ("window_size", "nan", {"window_size": (NAN, 0)}),
    "window bool": ("window_size", "(True, 0)", {"window_size": (True, 0)}),
    "window number": ("window_size", "4", {"window_size": 4}),
    "window of one": ("window_size", "(4,)", {"window_size": (4,)}),
    "window of three": ("window_size", "(1, 2, 3)", {"window_size": (1, 2, 3)}),
    "window text": ("window_size", "'10'", {"window_size": "10"}),
    "window tensor": ("window_size", "tensor", {"window_size": torch.tensor([3, 0])}),
    "window set": ("window_size", "{", {"window_size": {3, 0}}),
    "softcap negative": ("softcap", "-1.0", {"softcap": -1.0}),
    "softcap nan": ("softcap", "nan", {"softcap": NAN}),
    "softcap inf": ("softcap", "inf", {"softcap": INF}),
    "softcap none": ("softcap", "None", {"softcap": None}),
    "softcap bool": ("softcap", "True", {"softcap": True}),
    "dropout all": ("dropout_p", "1.0", {"dropout_p": 1.0}),
    "dropout negative": ("dropout_p", "-0.1", {"dropout_p": -0.1}),
    "dropout nan": ("dropout_p", "nan", {"dropout_p": NAN}),
    "dropout bool": ("dropout_p", "False", {"dropout_p": False}),
    "deterministic number": ("deterministic", "1", {"deterministic": 1}),
    "return_lse number": ("return_lse", "1", {"return_lse": 1}),
    "sinks list": ("sinks", "a list", {"sinks": [0.0] * 4}),
    "sinks for other heads": ("sinks", "(3,)", {"sinks": torch.zeros(3)}),
    "sinks with a batch": ("sinks", "(1, 4)", {"sinks": torch.zeros(1, 4)}),
    "sinks integer": ("sinks", "int64", {"sinks": torch.zeros(4, dtype=torch.int64)}),
    "sinks elsewhere": ("sinks", "device meta", {"sinks": torch.zeros(4, device="meta")}),
    "slopes list": ("alibi_slopes", "a list", {"alibi_slopes": [0.1] * 4}),
    "slopes for other heads": ("alibi_slopes", "(3,)", {"alibi_slopes": torch.zeros(3)}),
    "slopes of another batch": ("alibi_slopes", "(5, 4)", {"alibi_slopes": torch.zeros(5, 4)}),
    "slopes integer": ("alibi_slopes", "int64", {"alibi_slopes": torch.zeros(4, dtype=torch.int64)}),
    "slopes elsewhere": ("alibi_slopes", "device meta", {"alibi_slopes": torch.zeros(4, device="meta")}),
    "backend number": ("backend", "5", {"backend": 5}),
    "backend empty": ("backend", "''", {"backend": ""}),
    "backend no names": ("backend", "()", {"backend": ()}),
    "backend unknown": ("backend", "'cpu_flush'", {"backend": "cpu_flush"}),
}
MASKS = {
    "mask list": ("mask", "a list", {"mask": [[True]]}),
    "mask [Sq, Sk]": ("mask", "2 dimensions (5, 5)", {"mask": torch.ones(5, 5, dtype=torch.bool)}),
    "mask [B, Sq, Sk]": ("mask", "3 dimensions (2, 5, 5)", {"mask": torch.ones(2, 5, 5, dtype=torch.bool)}),
    "mask of five": ("mask", "5 dimensions", {"mask": torch.ones(1, 1, 1, 5, 5, dtype=torch.bool)}),
    "mask heads": ("mask", "(2, 3, 5, 5)", {"mask": torch.ones(2, 3, 5, 5, dtype=torch.bool)}),
    "mask keys": ("mask", "(1, 1, 5, 6)", {"mask": torch.ones(1, 1, 5, 6, dtype=torch.bool)}),
    "mask integer": ("mask", "int64", {"mask": torch.ones(1, 1, 5, 5, dtype=torch.int64)}),
    "mask elsewhere": ("mask", "device meta", {"mask": torch.ones(1, 1, 5, 5, device="meta")}),
    "mask sparse": ("mask", "sparse", {"mask": torch.ones(1, 1, 5, 5).to_sparse()}),
    "padding list": ("key_padding_mask", "a list", {"key_padding_mask": [[True] * 5] * 2}),
    "padding four": ("key_padding_mask", "4 dimensions", {"key_padding_mask": torch.ones(2, 1, 1, 5) > 0}),
    "padding one": ("key_padding_mask", "1 dimensions", {"key_padding_mask": torch.ones(5) > 0}),
    "padding shape": ("key_padding_mask", "(2, 4)", {"key_padding_mask": torch.ones(2, 4) > 0}),
    "padding broadcast": ("key_padding_mask", "(1, 5)", {"key_padding_mask": torch.ones(1, 5) > 0}),
    "padding float": ("key_padding_mask", "float32", {"key_padding_mask": torch.ones(2, 5)}),
    "padding elsewhere": (
        "key_padding_mask",
        "device meta",
        {"key_padding_mask": torch.ones(2, 5, dtype=torch.bool, device="meta")},
    ),
}


@pytest.mark.parametrize("case", [*PLAIN, *MASKS])
def test_dense_option(case):
    argument, got, options = {**PLAIN, **MASKS}[case]
    tensors = dense(2, 5)
    first = refused(argument, got, attention, *tensors, **options)
    attention(*tensors)
    assert refused(argument, got, attention, *tensors, **options) == first
    assert refused(argument, got, explain, *tensors, **options) == first
    assert refused(argument, got, select_backend, *tensors, **options) == first


@pytest.mark.parametrize("case", PLAIN)
def test_packed_option(case):
    argument, got, options = PLAIN[case]
    query, key, value, sequences = packed([6, 4])
    refused(argument, got, varlen_attention, query, key, value, sequences=sequences, **options)
    varlen_attention(query, key, value, sequences=sequences)
    refused(argument, got, varlen_attention, query, key, value, sequences=sequences, **options)
    refused(argument, got, explain, query, key, value, cu_seqlens=OFFSETS, **options)


LOOKALIKES = {
    "window float": ({"window_size": (3, 0)}, {"window_size": (3.0, 0.0)}),
    "window bool": ({"window_size": (1, 0)}, {"window_size": (True, False)}),
    "window range": ({"window_size": (3, 0)}, {"window_size": range(3, -1, -3)}),
    "window dict": ({"window_size": (3, 0)}, {"window_size": {3: None, 0: None}}),
    "window iterator": ({"window_size": (3, 0)}, {"window_size": iter((3, 0))}),
    "causal": ({"causal": True}, {"causal": 1}),
    "causal off": ({"causal": False}, {"causal": 0.0}),
    "scale": ({"scale": 1.0}, {"scale": True}),
    "softcap": ({"softcap": 0.0}, {"softcap": False}),
    "dropout": ({"dropout_p": 0.0}, {"dropout_p": False}),
    "deterministic": ({"deterministic": True}, {"deterministic": 1}),
    "return_lse": ({"return_lse": True}, {"return_lse": 1}),
}


@pytest.mark.parametrize("case", LOOKALIKES)
def test_a_right_call_does_not_let_its_lookalike_in(case):
    right, wrong = LOOKALIKES[case]
    (argument,) = wrong
    tensors = dense(2, 5)
    query, key, value, sequences = packed([6, 4])
    attention(*tensors, **right)
    refused(argument, "", attention, *tensors, **wrong)
    varlen_attention(query, key, value, sequences=sequences, **right)
    refused(argument, "", varlen_attention, query, key, value, sequences=sequences, **wrong)


@pytest.mark.parametrize("window", [[3, 0], [None, 0], (-1, 0), (None, None), (0, 0)])
def test_right_windows_work_as_tuple_and_list(window):
    tensors = dense(2, 5)
    torch.testing.assert_close(
        attention(*tensors, window_size=window), attention(*tensors, window_size=tuple(window)), rtol=0, atol=0
    )


# what was wrong -> the argument, what the message says it was, how to spoil the right (query, key, value)
TENSORS = {
    "query list": ("query", "a list", lambda q, k, v: (q.tolist(), k, v)),
    "key none": ("key", "a NoneType", lambda q, k, v: (q, None, v)),
    "value array": ("value", "a ndarray", lambda q, k, v: (q, k, v.numpy())),
    "query rank": ("query", "dimensions", lambda q, k, v: (q[0, 0], k, v)),
    "key rank": ("key", "dimensions", lambda q, k, v: (q, k.unsqueeze(0), v)),
    "value rank": ("value", "dimensions", lambda q, k, v: (q, k, v[..., 0])),
    "query integer": ("query", "int64", lambda q, k, v: (q.long(), k, v)),
    "query complex": ("query", "complex64", lambda q, k, v: (q.to(torch.complex64), k, v)),
    "query sparse": ("query", "sparse", lambda q, k, v: (q.to_sparse(), k, v)),
    "key dtype": ("key", "bfloat16", lambda q, k, v: (q, k.bfloat16(), v)),
    "value dtype": ("value", "float64", lambda q, k, v: (q, k, v.double())),
    "key device": ("key", "device meta", lambda q, k, v: (q, k.to("meta"), v)),
    "value device": ("value", "device meta", lambda q, k, v: (q, k, v.to("meta"))),
    "head counts": ("key", "3 heads", lambda q, k, v: (q, k[..., :3, :], v[..., :3, :])),
    "more key heads": ("key", "8 heads", lambda q, k, v: (q, torch.cat([k, k], -2), torch.cat([v, v], -2))),
    "no key heads": ("key", "0 heads", lambda q, k, v: (q, k[..., :0, :], v[..., :0, :])),
    "no heads": ("query", "0 heads", lambda q, k, v: (q[..., :0, :], k[..., :0, :], v[..., :0, :])),
    "no head dim": ("query", "head dim 0", lambda q, k, v: (q[..., :0], k[..., :0], v)),
    "no value dim": ("value", "head dim 0", lambda q, k, v: (q, k, v[..., :0])),
    "key dim": ("key", "head dim 4", lambda q, k, v: (q, k[..., :4], v)),
    "value heads": ("value", "2 heads", lambda q, k, v: (q, k, v[..., :2, :])),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case):
    argument, got, spoil = TENSORS[case]
    right = dense(2, 5, head_dim=8)
    query, key, value, sequences = packed([6, 4], head_dim=8)
    for _ in range(2):
        refused(argument, got, attention, *spoil(*right))
        if "rank" not in case:
            refused(argument, got, varlen_attention, *spoil(query, key, value), sequences=sequences)
        attention(*right)
        varlen_attention(query, key, value, sequences=sequences)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_packed_rank_says_which_call_takes_it(name):
    query, key, value, sequences = packed([6, 4])
    spoilt = {"query": query, "key": key, "value": value}
    spoilt[name] = spoilt[name].unsqueeze(0)
    message = refused(name, "4 dimensions", varlen_attention, *spoilt.values(), sequences=sequences)
    assert "attention takes batched" in message
    assert "varlen_attention takes packed" in refused("query", "3 dimensions", attention, query, key, value)


def test_rows_that_do_not_fit():
    query, key, value = dense(2, 5)
    refused("key", "batch 1", attention, query, key[:1], value)
    refused("value", "batch 1", attention, query, key, value[:1])
    refused("value", "4 rows", attention, query, key, value[:, :4])
    query, key, value, sequences = packed([6, 4])
    refused("value", "9 rows", varlen_attention, query, key, value[:9], sequences=sequences)


def test_a_mask_of_another_rank_says_which_of_the_two_to_use():
    tensors = dense(2, 5)
    message = refused("mask", "2 dimensions", attention, *tensors, mask=torch.ones(2, 5, dtype=torch.bool))
    assert "key_padding_mask" in message
    assert "mask[None, None]" in message
    four = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    message = refused("key_padding_mask", "4 dimensions", attention, *tensors, key_padding_mask=four)
    assert "goes in mask" in message


def test_packed_calls_take_no_mask():
    query, key, value, sequences = packed([6, 4])
    for name in ("mask", "key_padding_mask"):
        given = {name: torch.ones(1, 1, 1, 1, dtype=torch.bool)}
        refused(name, "given for packed", explain, query, key, value, sequences=sequences, **given)
        with pytest.raises(TypeError, match=name):
            varlen_attention(query, key, value, sequences=sequences, **given)
    refused("windows", "unknown option", explain, query, key, value, sequences=sequences, windows=(1, 0))


@pytest.mark.parametrize("backend", ["cpu_flash", "cpu_sdpa", "cpu_math"])
def test_inputs_that_are_not_contiguous_work(backend):
    query, key, value = dense(2, 5)
    spread = [torch.empty(2, 4, 8, 32)[..., ::2].permute(0, 2, 1, 3)[:, 1:6].copy_(t) for t in (query, key, value)]
    assert not any(tensor.is_contiguous() for tensor in spread)
    want = attention(query, key, value, backend=backend)
    torch.testing.assert_close(attention(*spread, backend=backend), want, rtol=1e-6, atol=1e-6)
    rows = [tensor[0].flip(0) for tensor in spread]
    loose = [torch.empty(5, 4, 33)[..., 1:17].copy_(row) for row in rows]
    got = varlen_attention(*loose, cu_seqlens=torch.tensor([0, 9, 2, 9, 5])[::2], backend=backend)
    want = varlen_attention(*rows, cu_seqlens=torch.tensor([0, 2, 5]), backend=backend)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_every_wrong_argument_is_a_value_error_but_no_configuration_error():
    with pytest.raises(ValueError, match="scale: got nan") as caught:
        attention(*dense(2, 5), scale=NAN)
    assert not isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 6), (6, 4), (6, 6)])
def test_head_counts_divide_or_are_refused(heads, kv_heads):
    query, key, value = dense(2, 5, heads=heads, kv_heads=kv_heads)
    if heads == kv_heads:
        assert attention(query, key, value).shape == query.shape
    else:
        refused("key", f"{kv_heads} heads", attention, query, key, value)
