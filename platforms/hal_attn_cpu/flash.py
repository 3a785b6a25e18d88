"""`cpu_flash`: PyTorch's flash attention kernel for the CPU, called below SDPA because that is where its LSE is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hal_attn.backend import AttentionResult
from hal_attn.capabilities import Capabilities
from hal_attn.masks import masked_inputs
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn.ring import RingBackend
from hal_attn_cpu.rules import positive_scale_rule


class CpuFlashBackend(RingBackend):
    """aten `_scaled_dot_product_flash_attention_for_cpu`, `[B, H, S, D]`, as of PyTorch 2.13 (observed there).

    Its rules: one head dimension for query, key and value; a top-left triangle; an additive mask in the dtype of query;
    no dropout; no gradient for the mask; an LSE without gradient, in float64 for float64 inputs; a row without visible
    keys gives LSE 0.0, so such rows are found from the masks. It reads the last dimension as if its stride were 1, and
    computes on whatever lies there. It takes grouped heads as they are. It stops the process (SIGFPE) on a call without
    queries or keys: the dispatcher answers those, this adapter never passes one on.
    """

    name = "cpu_flash"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16}),
        grouped_heads=True,
        causal="square",
        masks=frozenset({"bool", "float"}),
        mask_dtype_of_query=True,
        key_padding_mask=True,
        deterministic=True,
        lse=True,
        gradients=True,
    )

    def unavailable(self) -> Refusal | None:
        if hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
            return None
        return Refusal("installed", f"PyTorch {torch.__version__}", "PyTorch with the CPU flash kernel, 2.2 or later")

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        return super().refusals(request) + positive_scale_rule(request)

    def bind(self, request: AttentionRequest) -> Callable[..., AttentionResult] | None:
        kernel, causal, scale = _kernel(), request.causal, request.scale
        if request.return_lse:
            return None

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # Asked at once and first, because a stride and a call for each tensor would take 0.5 us more.
            if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
                query, key, value = _dense(query), _dense(key), _dense(value)
            output: Tensor = kernel(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), 0.0, causal, scale=scale
            )[0]
            return output.transpose(1, 2)

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
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> AttentionResult:
        inputs = masked_inputs(query, key, value, mask, key_padding_mask, causal)
        output, lse = _kernel()(
            _dense(inputs.query).transpose(1, 2),
            _dense(inputs.key).transpose(1, 2),
            _dense(inputs.value).transpose(1, 2),
            0.0,
            causal,
            attn_mask=inputs.added,
            scale=scale,
        )
        if inputs.blind is not None:
            output = output.masked_fill(inputs.blind.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(inputs.blind, -torch.inf)
        output = output.transpose(1, 2)
        return (output, lse.to(torch.float32)) if return_lse else output


def _dense(tensor: Tensor) -> Tensor:
    """`tensor`, copied where its last dimension has another stride than 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    # The function in the torch namespace is the same operator, and 0.8 us a call quicker than torch.ops.
    kernel: Callable[..., tuple[Tensor, Tensor]] = getattr(
        torch,
        "_scaled_dot_product_flash_attention_for_cpu",
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    )
    return kernel
