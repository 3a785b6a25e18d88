"""`acme_fused`: Acme's fused kernel, on the frame of hal_attn."""

from __future__ import annotations

import math

import torch
from hal_attn import Capabilities
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult
from torch import Tensor


class AcmeFusedBackend(BatchedKernel):
    """`fused_attention`, `[B, S, H, D]`: an unlimited edge is None, the LSE is in base 2 and `[B, S, H]`."""

    name = "acme_fused"
    install = "pip install hal-attn-acme"
    head_dim_multiple = 16
    native_grouped_heads = False
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16}),
        max_head_dim=128,
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        sinks=True,
        lse=True,
    )

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        before, after = (None if edge < 0 else edge for edge in (call.left, call.right))
        kernel = self.library.fused_attention
        output, lse = kernel(query, key, value, call.scale, before, after, with_lse=call.needs_lse)
        return output, lse.transpose(1, 2) * math.log(2) if call.needs_lse else None
