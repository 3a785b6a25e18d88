"""A kernel that does nothing, found and asked for as any vendor's is, and gone afterwards."""

import pytest
import torch

import hal_attn
from hal_attn import PackedSequences
from hal_attn.bench.nothing import NothingPlatform, asked_for, installed
from hal_attn.errors import ConfigurationError


def tensors():
    return tuple(torch.randn(1, 8, 2, 16) for _ in range(3))


@pytest.mark.parametrize("backend", [None, "nothing_framed"])
def test_calls_of_it_return_the_value_itself(backend):
    query, key, value = tensors()
    sequences = PackedSequences.from_lengths([5, 3])
    with installed(), asked_for(), torch.no_grad():
        output = hal_attn.attention(query, key, value, backend=backend)
        packed = hal_attn.varlen_attention(query[0], key[0], value[0], sequences=sequences, backend=backend)
    assert output.data_ptr() == packed.data_ptr() == value.data_ptr()
    assert torch.equal(output, value)


def test_it_is_there_only_where_it_is_asked_for():
    query, key, value = tensors()
    with installed():
        with asked_for():
            assert hal_attn.select_backend(query, key, value).name == "nothing"
        assert hal_attn.select_backend(query, key, value).name == "cpu_flash"
        ours = hal_attn.attention(query, key, value)
    assert not torch.equal(ours, value)
    assert NothingPlatform.name not in [platform.name for platform in hal_attn.platforms()]
    with asked_for(), pytest.raises(ConfigurationError, match="HAL_ATTN_PLATFORM: got 'nothing'"):
        hal_attn.select_backend(query, key, value)


def test_what_else_the_environment_asks_for_does_not_reach_it(monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda")
    monkeypatch.setenv("HAL_ATTN_BACKEND", "cpu_math")
    with installed(), asked_for():
        assert hal_attn.select_backend(*tensors()).name == "nothing"
