"""Simulated functions take exactly what the vendors' take, so a call that binds here binds there."""

import pytest
from hal_attn_cuda.simulated.cudnn import simulated_cudnn
from hal_attn_cuda.simulated.flash_attn_3 import simulated_flash_attn_3
from hal_attn_cuda.simulated.flash_attn_4 import simulated_flash_attn_4
from hal_attn_cuda.simulated.flashinfer import simulated_flashinfer

from hal_attn.simulation.aten import simulated_aten
from hal_attn.simulation.flash_attn import simulated_flash_attn
from tests.vendors.signatures import assert_same_signature

FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func")
FA3_FWD = simulated_flash_attn_3("fa3_fwd", "sm90")
PAIRS = [
    *((simulated_flash_attn(), name, "flash_attn") for name in FUNCTIONS),
    *((FA3_FWD.module, name, "fa3_fwd_interface") for name in FUNCTIONS),
    *((simulated_flash_attn_3("full", "sm90").module, name, "flash_attn_interface") for name in FUNCTIONS),
    *((simulated_flash_attn_4("sm90"), name, "flash_attn.cute") for name in FUNCTIONS),
    (simulated_flashinfer(), "cudnn_batch_prefill_with_kv_cache", "flashinfer.cudnn.prefill"),
    (simulated_cudnn("sm90"), "_scaled_dot_product_cudnn_attention", "torch.ops.aten"),
    (simulated_cudnn("sm90"), "_scaled_dot_product_cudnn_attention_backward", "torch.ops.aten"),
    (simulated_aten(), "_flash_attention_forward", "torch.ops.aten"),
    (simulated_aten(), "_flash_attention_backward", "torch.ops.aten"),
    (simulated_aten(), "_efficient_attention_forward", "torch.ops.aten"),
    (simulated_flash_attn_4("sm90").interface, "_flash_attn_bwd", "flash_attn.cute.interface"),
]


def test_fa3_fwd_s_operator_has_the_same_signature():
    assert_same_signature(FA3_FWD.operator, "torch.ops.fa3_fwd.fwd")


@pytest.mark.parametrize(("library", "name", "module"), PAIRS, ids=[f"{module}.{name}" for _, name, module in PAIRS])
def test_same_signature(library, name, module):
    assert_same_signature(getattr(library, name), f"{module}.{name}")
