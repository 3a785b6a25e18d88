"""Memory of attention in plain PyTorch follows the inputs, forward and backward, not `Sq * Sk`."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hal_attn import attention, tiles
from tests.support import dense


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operator makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (50, 20)}, {"softcap": 3.0}], ids=str)
def test_no_tensor_grows_with_queries_times_keys(monkeypatch, options):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1 << 14)
    query, key, value = (tensor.requires_grad_() for tensor in dense(1, 1024, heads=2, head_dim=8))
    with LargestTensor() as largest:
        attention(query, key, value, backend="cpu_math", **options).sum().backward()
    assert largest.elements <= max(1 << 14, query.numel())
    assert largest.elements < 2 * 1024 * 1024 / 32
