"""Packed sequences of one length go to the batched function of FlashAttention 3 and 4, and only those."""

from dataclasses import replace
from functools import wraps

import pytest
import torch

from hal_attn import PackedSequences, explain, varlen_attention
from hal_attn.registry import default_registry
from tests.cuda.calls import sequences
from tests.support import assert_right

FUNCTIONS = {"flash_attn_func": "batched", "flash_attn_varlen_func": "packed"}


@pytest.fixture
def called(simulate, monkeypatch):
    """What FlashAttention 3 is called for, call by call."""
    simulate("sm90,fa3=full")
    platform = default_registry().simulation("cuda:sm90,fa3=full")
    backend = next(backend for backend in platform.backends() if backend.name == "flash_attn_3")
    calls = []
    for name, what in FUNCTIONS.items():
        function = getattr(backend.library.module, name)

        @wraps(function)
        def noting(*arguments, _function=function, _what=what, **options):
            calls.append(_what)
            return _function(*arguments, **options)

        monkeypatch.setattr(backend.library.module, name, noting)
    return calls


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    ("lengths", "lengths_k", "options", "where"),
    [
        ((5, 5, 5), (5, 5, 5), {}, "batched"),
        ((5, 5, 5), (7, 7, 7), {"causal": True}, "batched"),
        ((7, 7), (5, 5), {"causal": True}, "packed"),
        ((6, 6), (6, 6), {"window_size": (2, 1), "softcap": 5.0}, "batched"),
        ((9,), (9,), {"causal": True}, "batched"),
        ((9,), (9,), {}, "batched"),
        ((5, 6), (5, 6), {}, "packed"),
        ((5, 5), (5, 6), {}, "packed"),
        ((5, 0), (5, 0), {}, "packed"),
    ],
)
def test_where_it_goes(called, lengths, lengths_k, options, where, return_lse):
    tensors, given = sequences(lengths, lengths_k, kv_heads=2, **options)
    result = varlen_attention(*tensors, backend="flash_attn_3", return_lse=return_lse, **given)
    assert called == [where]
    assert isinstance(result, tuple) == return_lse
    assert "flash_attn_3" in assert_right(*tensors, **given)


def test_more_sequences_than_a_grid_has_blocks_stay_with_the_packed_kernel_of_flash_attention_4(simulate):
    simulate("sm90")
    tensors, given = sequences((5, 5, 5))
    found = explain(*tensors, **given)
    backend = next(each.backend for each in found.considered if each.backend.name == "flash_attn_4")
    assert backend.prefers_batched(replace(found.request, batch=65_535))
    assert not backend.prefers_batched(replace(found.request, batch=65_536))


def test_offsets_that_only_the_device_knows_are_read(called):
    """Also where one sequence of the longest length can only be all rows: the device has the word."""
    tensors, _ = sequences((9,))
    offsets = torch.tensor([0, 9], dtype=torch.int32)
    packing = PackedSequences.from_device_offsets(offsets, offsets, 9, 9)
    varlen_attention(*tensors, sequences=packing, backend="flash_attn_3")
    assert called == ["packed"]
