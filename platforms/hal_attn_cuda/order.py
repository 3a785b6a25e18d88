"""Which backend is tried first on which generation: by measurement where there is one (H200, PyTorch 2.11, bf16)."""

from __future__ import annotations

from hal_attn.portable.generation import compute_capability
from hal_attn.request import AttentionRequest

LAST = ("torch_efficient", "torch_math")
# Below this, a causal batch is quicker on cuDNN: 426 TFLOP/s at 1,024 tokens, FlashAttention 4 has 410, 3 has 315. At
# 4,096 tokens FlashAttention 3 leads with 628, before 4 with 572 and cuDNN with 569.
SHORT = 2048


def default_order(request: AttentionRequest, architecture: str) -> tuple[str, ...]:
    """Backend names, best first; those that the device cannot run refuse by themselves."""
    generation = (compute_capability(architecture) or 80) // 10
    first = {9: _hopper(request), 10: _blackwell(request), 11: _blackwell(request)}.get(generation, _others(request))
    return (*first, *LAST)


def _hopper(request: AttentionRequest) -> tuple[str, ...]:
    if request.packed:
        # 10 sequences of 16,384 to 32 tokens: FlashAttention 3 has 687 TFLOP/s, 4 has 686, PyTorch's own 355.
        return ("flash_attn_3", "flash_attn_4", "flashinfer_cudnn", "flash_attn", "torch_flash", "torch_cudnn")
    short = request.causal and max(request.seqlen_q or 0, request.seqlen_k or 0) < SHORT
    if short:
        return ("torch_cudnn", "flash_attn_4", "flash_attn_3", "flash_attn", "torch_flash")
    return ("flash_attn_3", "flash_attn_4", "torch_cudnn", "flash_attn", "torch_flash")


def _blackwell(request: AttentionRequest) -> tuple[str, ...]:
    """Not measured: FlashAttention 4 and cuDNN have kernels for it, FlashAttention 2 runs Ampere's."""
    packed = ("flashinfer_cudnn",) if request.packed else ()
    return ("flash_attn_4", *packed, "torch_cudnn", "flash_attn", "torch_flash")


def _others(request: AttentionRequest) -> tuple[str, ...]:
    """sm80 to sm89 and sm12x. Not measured: FlashAttention 2 was written for the first of them."""
    return ("flash_attn", "torch_flash", "torch_cudnn", "flash_attn_3", "flash_attn_4", "flashinfer_cudnn")
