"""`cpu_sdpa`: PyTorch's public `scaled_dot_product_attention` on the CPU."""

from __future__ import annotations

from hal_attn.portable.sdpa import SdpaBackend
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn_cpu.rules import positive_scale_rule


class CpuSdpaBackend(SdpaBackend):
    """`SdpaBackend` on the CPU, where a causal call may run the flash kernel and has its rule about the scale."""

    name = "cpu_sdpa"

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        return super().refusals(request) + positive_scale_rule(request)
