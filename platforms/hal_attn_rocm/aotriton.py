"""`torch_flash` and `torch_efficient` on AMD devices, where PyTorch runs them over AOTriton."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from hal_attn.portable.aten_efficient import TorchEfficientBackend
from hal_attn.portable.aten_flash import TorchFlashBackend
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn_rocm.rules import architecture_rule

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
NATURAL_LSE = "2.9"


class RocmTorchFlashBackend(TorchFlashBackend):
    """aten `_flash_attention_forward` over AOTriton (PyTorch 2.13, mha_all_aot.hip).

    Its rules beside the portable ones: no window, which older releases leave unread and newer ones count from the top
    left; no ALiBi, which the batched function leaves unread; causal with as many keys as queries only, because which
    corner the triangle hangs from changed with AOTriton 0.10; the LSE in base 2 before PyTorch 2.9.
    """

    capabilities = replace(TorchFlashBackend.capabilities, causal="square", window=False, alibi_slopes=False)

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        return super().refusals(request) + _aotriton_rules(request, self.architecture(request.device))


class RocmTorchEfficientBackend(TorchEfficientBackend):
    """aten `_efficient_attention_forward` over AOTriton (PyTorch 2.13, transformers/hip/attention.hip).

    Its rules beside the portable ones: no window; head dims of at most 512; causal with as many keys as queries only,
    because the triangle from the bottom right came with AOTriton 0.10; the LSE in base 2 before PyTorch 2.9, and none
    of a packed call, whose rows the two libraries lay out in their own ways.
    """

    capabilities = replace(TorchEfficientBackend.capabilities, causal="square", window=False, max_head_dim=512)
    # The portable ones are CUTLASS's.
    tolerances = MappingProxyType({})

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        refusals = super().refusals(request) + _aotriton_rules(request, self.architecture(request.device))
        if request.packed and (request.return_lse or request.sinks):
            name = "return_lse" if request.return_lse else "sinks"
            refusals += (Refusal(name, "the LSE of a packed call", "a batched call"),)
        return refusals


def _aotriton_rules(request: AttentionRequest, architecture: str) -> tuple[Refusal, ...]:
    refusals = architecture_rule(architecture, ARCHITECTURES, "PyTorch's AOTriton")
    if (request.return_lse or request.sinks) and torch.__version__ < NATURAL_LSE:
        refusals += (Refusal("return_lse", f"PyTorch {torch.__version__}, in base 2", f"PyTorch {NATURAL_LSE}"),)
    return refusals
