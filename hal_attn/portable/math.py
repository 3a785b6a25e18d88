"""Attention in plain PyTorch, a tile of scores at a time: every option of every call, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from hal_attn.backend import AttentionResult
from hal_attn.capabilities import Capabilities
from hal_attn.chunked import chunked_attention
from hal_attn.ring import RingBackend


class MathBackend(RingBackend):
    """`hal_attn.chunked`: memory follows the inputs, computed in float32 (float64 for float64 inputs)."""

    name = "torch_math"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16}),
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        masks=frozenset({"bool", "float"}),
        key_padding_mask=True,
        softcap=True,
        sinks=True,
        alibi_slopes=True,
        dropout=True,
        deterministic=True,
        lse=True,
        lse_gradient=True,
        gradients=True,
        option_gradients=frozenset({"mask", "sinks", "alibi_slopes"}),
    )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] | None = None,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> AttentionResult:
        output, lse = chunked_attention(
            query,
            key,
            value,
            scale=scale,
            causal=causal,
            window_size=window_size,
            mask=mask,
            key_padding_mask=key_padding_mask,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            dropout_p=dropout_p,
        )
        return (output, lse) if return_lse else output
