"""PyTorch's own flash and memory-efficient attention over AOTriton, on the CPU."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hal_attn.simulation.aten import EfficientResult, FlashResult, must, simulated_aten

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


def simulated_aotriton(architecture: str, empty_lse: float | None = None) -> SimpleNamespace:
    """The two operators of PyTorch's ROCm build on one generation: no window, no ALiBi, and LSEs laid out in their own
    way; a row without keys gives LSE as in PyTorch's CUDA build, or `empty_lse`."""
    aten = simulated_aten(empty_lse)

    @functools.wraps(aten._flash_attention_forward)
    def _flash_attention_forward(*args: Any, **kwargs: Any) -> FlashResult:
        _check_gpu(architecture)
        must(kwargs.get("alibi_slopes") is None, "[ROCm] mha_varlen_fwd: alibi_slopes_ must be nullopt")
        # Releases before AOTriton 0.10 leave windows unread.
        kwargs |= {"window_size_left": None, "window_size_right": None}
        output, lse, seed, offset, mask = aten._flash_attention_forward(*args, **kwargs)
        offsets, longest = args[3], args[5]
        return output, lse if offsets is None else _padded_rows(lse, offsets, longest), seed, offset, mask

    @functools.wraps(aten._efficient_attention_forward)
    def _efficient_attention_forward(*args: Any, **kwargs: Any) -> EfficientResult:
        _check_gpu(architecture)
        must(kwargs.get("window_size") is None, "ROCM does not support window_size in _efficient_attention_forward")
        output, lse, seed, offset, longest, longest_k = aten._efficient_attention_forward(*args, **kwargs)
        return output, lse[..., : output.shape[1]], seed, offset, longest, longest_k

    return SimpleNamespace(
        _flash_attention_forward=_flash_attention_forward, _efficient_attention_forward=_efficient_attention_forward
    )


def _check_gpu(architecture: str) -> None:
    must(architecture in ARCHITECTURES, "[AOTriton] Accelerated SDPA only supports MI200/MI300X/7900XTX/9070XT GPUs")


def _padded_rows(lse: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """`[H, Tq]` -> `[N, H, longest]`."""
    parts = lse.split([end - begin for begin, end in itertools.pairwise(offsets.tolist())], 1)
    return torch.stack([F.pad(part, (0, longest - part.shape[1]), value=torch.nan) for part in parts])
