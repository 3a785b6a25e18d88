"""`aiter_triton`: AITER's attention in Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal_attn.capabilities import Capabilities
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult, PackedKernel
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn_rocm.rules import architecture_rule

# AITER 0.1.7 looks its block sizes up by generation, and has them for these two.
TUNED_ARCHITECTURES = ("gfx942", "gfx950")


class AiterTritonBackend(BatchedKernel, PackedKernel):
    """`flash_attn_func` and `flash_attn_varlen_func` of aiter.ops.triton.mha, amd-aiter 0.1.7.

    Its rules: float16 and bfloat16; one head dim, padded to a multiple of 8, because the backward pass gives gradients
    of the head dim that it pads to itself; causal aligned to the bottom right; no bias and no window, for which it
    raises ValueError; no softcap; ALiBi slopes `[B, H]` only. The packed LSE is `[Tq, H]`, and a row without keys gives
    LSE 0.0. Left unclaimed: dropout, which keeps all Sq * Sk scores in float32, and `deterministic`, which it drops.
    """

    name = "aiter_triton"
    distribution = "amd-aiter"
    install = "pip install 'hal-attn[rocm]'"
    head_dim_multiple = 8
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        max_head_dim=256,
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        sinks=True,
        alibi_slopes=True,
        lse=True,
        gradients=True,
    )

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        architecture = self.architecture(request.device)
        return super().refusals(request) + architecture_rule(architecture, TUNED_ARCHITECTURES, "AITER's Triton")

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        options: dict[str, Any] = {
            "softmax_scale": call.scale,
            "causal": call.causal,
            "alibi_slopes": batched_slopes(query, call),
            "return_lse": call.needs_lse,
        }
        if call.metadata is None:
            result = self.library.flash_attn_func(query, key, value, **options)
            return result if call.needs_lse else (result, None)
        sequences = call.metadata.sequences
        offsets, offsets_k = sequences.offsets(query.device)
        result = self.library.flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets_k,
            max_seqlen_q=sequences.max_seqlen,
            max_seqlen_k=sequences.max_seqlen_k,
            **options,
        )
        return (result[0], result[1].transpose(0, 1)) if call.needs_lse else (result, None)


def batched_slopes(query: Tensor, call: KernelCall) -> Tensor | None:
    """ALiBi's slopes as AMD's Triton kernels take them: float32 `[B, H]`, packed `[N, H]`."""
    if call.alibi_slopes is None:
        return None
    batch = query.shape[0] if call.metadata is None else call.metadata.sequences.count
    return call.alibi_slopes.float().expand(batch, query.shape[-2]).contiguous()
