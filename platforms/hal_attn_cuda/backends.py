"""The backends of NVIDIA devices, and where each finds its library. Nothing is imported before a backend is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.kernels import KernelBackend
from hal_attn.portable.aten_efficient import TorchEfficientBackend
from hal_attn.portable.aten_flash import TorchFlashBackend
from hal_attn.portable.flash_attn import FlashAttentionBackend, import_flash_attn
from hal_attn.portable.math import MathBackend
from hal_attn_cuda.cudnn import TorchCudnnBackend
from hal_attn_cuda.flash_attn_3 import FlashAttention3Backend, import_flash_attn_3
from hal_attn_cuda.flash_attn_4 import FlashAttention4Backend, import_flash_attn_4
from hal_attn_cuda.flashinfer import FlashInferCudnnBackend, import_flashinfer

Libraries = Mapping[type[KernelBackend], Callable[[], Any]]


def _aten() -> Any:
    return torch.ops.aten


INSTALLED: Libraries = {
    FlashAttention3Backend: import_flash_attn_3,
    FlashAttention4Backend: import_flash_attn_4,
    FlashAttentionBackend: import_flash_attn,
    FlashInferCudnnBackend: import_flashinfer,
    TorchCudnnBackend: _aten,
    TorchFlashBackend: _aten,
    TorchEfficientBackend: _aten,
}


def make_backends(libraries: Libraries, architecture: Callable[[torch.device], str]) -> tuple[AttentionBackend, ...]:
    """One backend of each kind over `libraries`, and attention in plain PyTorch, which needs none."""
    return (*(kind(library, architecture) for kind, library in libraries.items()), MathBackend())
