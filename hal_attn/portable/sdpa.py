"""PyTorch's public `scaled_dot_product_attention`, which also takes dropout and another value head dim."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hal_attn.backend import AttentionResult
from hal_attn.capabilities import Capabilities
from hal_attn.chunked import chunked_lse
from hal_attn.masks import masked_inputs
from hal_attn.request import AttentionRequest
from hal_attn.ring import RingBackend


class SdpaBackend(RingBackend):
    """`torch.nn.functional.scaled_dot_product_attention`, `[B, H, S, D]`, as of PyTorch 2.13.

    Its rules: a top-left triangle; a float mask in the dtype of query; grouped heads with `enable_gqa`. Where its flash
    kernel does not apply (dropout, another value head dim) it keeps all Sq * Sk scores. It returns no LSE: that is a
    second pass over the scores in plain PyTorch, and carries no gradient.
    """

    name = "torch_sdpa"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16}),
        value_head_dim=True,
        grouped_heads=True,
        causal="square",
        masks=frozenset({"bool", "float"}),
        mask_dtype_of_query=True,
        key_padding_mask=True,
        dropout=True,
        deterministic=True,
        lse=True,
        gradients=True,
        option_gradients=frozenset({"mask"}),
    )

    def bind(self, request: AttentionRequest) -> Callable[..., AttentionResult] | None:
        causal, scale, dropout_p = request.causal, request.scale, request.dropout_p
        grouped = request.heads != request.kv_heads
        if request.return_lse:
            return None

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                None,
                dropout_p,
                causal,
                scale=scale,
                enable_gqa=grouped,
            ).transpose(1, 2)

        return run

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> AttentionResult:
        inputs = masked_inputs(query, key, value, mask, key_padding_mask, causal)
        # SDPA leaves open what a mask and is_causal do together, so the triangle joins the mask.
        joined = inputs.joined()
        output = F.scaled_dot_product_attention(
            inputs.query.transpose(1, 2),
            inputs.key.transpose(1, 2),
            inputs.value.transpose(1, 2),
            joined,
            dropout_p,
            causal and joined is None,
            scale=scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        if inputs.blind is not None:
            output = output.masked_fill(inputs.blind.unsqueeze(-1), 0.0)
        output = output.transpose(1, 2)
        if not return_lse:
            return output
        return output, chunked_lse(
            inputs.query, inputs.key, scale=scale, causal=causal, mask=mask, key_padding_mask=key_padding_mask
        )
