"""`ascend_sdpa` and `ascend_math`: PyTorch's own operators on NPUs, for what the fused kernels refuse."""

from __future__ import annotations

from dataclasses import replace

import torch

from hal_attn.portable.math import MathBackend
from hal_attn.portable.sdpa import SdpaBackend
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class AscendSdpaBackend(SdpaBackend):
    """`SdpaBackend` in the dtypes of NPUs. Whether it repeats bit by bit depends on the kernel that PyTorch takes."""

    name = "ascend_sdpa"
    capabilities = replace(SdpaBackend.capabilities, dtypes=DTYPES, deterministic=False)

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        refusals = super().refusals(request)
        if request.causal and request.softmax_scale <= 0:
            # A kernel that hides keys with -inf before it scales, as PyTorch's on the CPU does, gives NaN here.
            have = f"causal with scale {request.scale}"
            refusals += (Refusal("scale", have, "causal with a scale above 0"),)
        return refusals


class AscendMathBackend(MathBackend):
    """`MathBackend` in the dtypes of NPUs, which multiply no float64 matrices.

    CANN may add in any order unless told otherwise, so `deterministic` needs PyTorch's deterministic algorithms, which
    torch_npu passes on.
    """

    name = "ascend_math"
    capabilities = replace(MathBackend.capabilities, dtypes=DTYPES)

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        refusals = super().refusals(request)
        if request.deterministic and not torch.are_deterministic_algorithms_enabled():
            have, allowed = "CANN in its default mode", "CANN in its deterministic mode"
            refusals += (Refusal("deterministic", have, allowed, "call torch.use_deterministic_algorithms(True)"),)
        return refusals
