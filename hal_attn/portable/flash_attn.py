"""`flash_attn`: FlashAttention 2, on NVIDIA devices and, built for ROCm, on AMD's."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from hal_attn.capabilities import Capabilities
from hal_attn.guard import attempt
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult, PackedKernel
from hal_attn.portable.flash_rules import longest_lengths, positive_scale_rule, window_rule
from hal_attn.portable.generation import capability_rule, flash2_backward_rule, grid_rule
from hal_attn.portable.lse import packed_lse
from hal_attn.portable.operators import aligned
from hal_attn.probing import has_parameter
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest


class FlashAttentionBackend(BatchedKernel, PackedKernel):
    """`flash_attn_func` and `flash_attn_varlen_func` of flash-attn 2.6 to 2.8 (rules read from its 2.8.3 sources).

    Its rules: float16 and bfloat16; one head dim of at most 256, padded to a multiple of 8; causal and windows aligned
    to the bottom right, -1 unlimited; softcap not with dropout; ALiBi slopes in float32; the LSE beside the output only
    with `return_attn_probs`, and its gradient is dropped. A row without keys gives LSE +inf. Packed, the LSE is
    `[H, Tq]`, and `[B, H, max_seqlen]` padded before the layout changed in 2.6. `deterministic` is about the backward
    pass; the forward pass always repeats. softcap came with 2.6. It loads 16 bytes at a time, wherever rows lie. On
    NVIDIA devices, compute capability 8.0 or later.
    """

    name = "flash_attn"
    distribution = "flash-attn"
    install = "pip install flash-attn --no-build-isolation"
    head_dim_multiple = 8
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        max_head_dim=256,
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        softcap=True,
        sinks=True,
        alibi_slopes=True,
        dropout=True,
        deterministic=True,
        lse=True,
        gradients=True,
    )

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        architecture = self.architecture(request.device)
        refusals = super().refusals(request)
        refusals += capability_rule(architecture, 80, "FlashAttention 2")
        refusals += flash2_backward_rule(request, architecture) + window_rule(request) + positive_scale_rule(request)
        refusals += grid_rule(request)
        if request.softcap > 0 and request.dropout_p > 0:
            refusals += (Refusal("softcap", f"{request.softcap} with dropout", "one of the two"),)
        function = getattr(attempt(lambda: self.library, None)[0], "flash_attn_func", None)
        if request.softcap > 0 and function is not None and not has_parameter(function, "softcap"):
            refusals += (Refusal("softcap", "flash-attn without it", "flash-attn 2.6", self.install),)
        return refusals

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        options = {
            "dropout_p": call.dropout_p,
            "softmax_scale": call.scale,
            "causal": call.right == 0,
            "window_size": (call.left, call.right),
            "alibi_slopes": None if call.alibi_slopes is None else call.alibi_slopes.float().contiguous(),
            "deterministic": call.deterministic,
            "return_attn_probs": call.needs_lse,
        }
        if call.softcap > 0:
            options["softcap"] = call.softcap
        rows = [aligned(tensor, self.head_dim_multiple) for tensor in (query, key, value)]
        if call.metadata is None:
            result = self.library.flash_attn_func(*rows, **options)
        else:
            sequences = call.metadata.sequences
            cu_seqlens, cu_seqlens_k = sequences.offsets(query.device)
            lengths = longest_lengths(sequences, call)
            result = self.library.flash_attn_varlen_func(*rows, cu_seqlens, cu_seqlens_k, *lengths, **options)
        if not call.needs_lse:
            return result, None
        output, lse = result[:2]
        if call.metadata is not None and lse.dim() == 3:
            lse = packed_lse(lse, call.metadata.sequences, query.shape[0])
        return output, lse


def import_flash_attn() -> ModuleType:
    """The package, which must be FlashAttention 2's: FlashAttention 4 alone makes the name an empty namespace."""
    flash_attn = import_module("flash_attn")
    if not hasattr(flash_attn, "flash_attn_func"):
        raise ImportError("flash_attn has no flash_attn_func: another distribution makes that name")
    return flash_attn
