"""A kernel that does nothing, found as any vendor's is, and gone afterwards."""

import pytest
import torch

import hal_attn
from hal_attn import PackedSequences
from hal_attn.bench.nothing import NothingPlatform, installed, undisturbed
from hal_attn.errors import HalAttnError


def tensors():
    return tuple(torch.empty(1, 8, 2, 16, device="meta") for _ in range(3))


@pytest.mark.parametrize("backend", [None, "nothing_framed"])
def test_calls_of_it_return_the_value_itself(backend):
    query, key, value = tensors()
    sequences = PackedSequences.from_lengths([5, 3])
    with installed(), undisturbed(), torch.no_grad():
        output = hal_attn.attention(query, key, value, backend=backend)
        packed = hal_attn.varlen_attention(query[0], key[0], value[0], sequences=sequences, backend=backend)
    assert backend is not None or output is value
    assert (output.shape, packed.shape) == (value.shape, value[0].shape)


def test_it_is_there_only_within():
    query, key, value = tensors()
    with installed(), undisturbed():
        assert hal_attn.select_backend(query, key, value).name == "nothing"
        assert hal_attn.select_backend(*(torch.zeros(1, 8, 2, 16) for _ in range(3))).name == "cpu_flash"
    assert NothingPlatform.name not in [platform.name for platform in hal_attn.platforms()]
    with pytest.raises(HalAttnError, match="meta"):
        hal_attn.select_backend(query, key, value)


def test_what_else_the_environment_asks_for_does_not_reach_it(monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda")
    monkeypatch.setenv("HAL_ATTN_BACKEND", "cpu_math")
    with installed(), undisturbed():
        assert hal_attn.select_backend(*tensors()).name == "nothing"
