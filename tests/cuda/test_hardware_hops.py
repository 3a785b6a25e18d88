"""Gradients of hops on a real NVIDIA device: `python -m pytest -m cuda tests/cuda/test_hardware_hops.py`."""

import pytest
import torch

from tests.cuda import hardware
from tests.cuda.hops import HOPS, backend_named, gradients_of_hops

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HOPS)
@pytest.mark.parametrize("backend", ["torch_cudnn", "torch_flash", "flash_attn_4"])
def test_hops_add_up_to_the_whole(backend, name, dtype):
    missing = hardware.unavailable(backend)
    if missing is not None:
        assert backend not in hardware.OWN, str(missing)
        return
    gradients_of_hops(HOPS[name], backend_named(backend, "cuda"), "cuda", dtype)
