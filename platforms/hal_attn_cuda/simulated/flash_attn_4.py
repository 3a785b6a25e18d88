"""FlashAttention 4's functions on the CPU, under the signatures, conventions and limits of flash-attn-4 4.0.0b36."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hal_attn.portable.generation import compute_capability
from hal_attn.simulation.aten import ALIGNMENT, host_offsets
from hal_attn.simulation.attention import Band, attend, attend_packed, check_grid, check_loads, spoiled_by_scale
from hal_attn_cuda.simulated.flash_attn_4_backward import simulated_interface

Result = tuple[Tensor, Tensor | None]
Window = tuple[int | None, int | None]


def simulated_flash_attn_4(generation: str, empty_lse: float | None = None) -> SimulatedFlashAttention4:
    """The package on a device of `generation`; a row without keys gives LSE -inf, or `empty_lse`."""
    return SimulatedFlashAttention4(generation, -math.inf if empty_lse is None else empty_lse)


@dataclass(frozen=True)
class SimulatedFlashAttention4:
    """`flash_attn.cute`. What it demands it asserts, so a broken rule is an AssertionError."""

    generation: str
    empty_lse: float

    @property
    def interface(self) -> SimpleNamespace:
        """The module behind it, with the backward function."""
        return simulated_interface(self.generation)

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bwd: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        aux_tensors: list[Tensor] | None = None,
        aux_scalars: tuple[Any, ...] | None = None,
        block_sparse_tensors: Any = None,
        block_sparse_tensors_bwd: Any = None,
        return_lse: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> Result:
        must(qv is None and gather_kv_indices is None and mask_mod is None, "the simulation has no further inputs")
        options = (softmax_scale, softcap, learnable_sink, deterministic, return_lse)
        return self._run((q, k, v), None, _band(causal, window_size), *options)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bwd: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        block_sparse_tensors: Any = None,
        aux_tensors: list[Tensor] | None = None,
        aux_scalars: tuple[Any, ...] | None = None,
        return_lse: bool = False,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> Result:
        must(qv is None and page_table is None and seqused_k is None, "the simulation has no further inputs")
        must(cu_seqlens_q is not None and cu_seqlens_k is not None, "the simulation packs queries and keys")
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        offsets = (host_offsets(cu_seqlens_q, max_seqlen_q or 0), host_offsets(cu_seqlens_k, max_seqlen_k or 0))
        options = (softmax_scale, softcap, learnable_sink, deterministic, return_lse)
        return self._run((q, k, v), offsets, _band(causal, window_size), *options)

    def _run(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        offsets: tuple[list[int], list[int]] | None,
        band: Band,
        scale: float | None,
        softcap: float,
        sinks: Tensor | None,
        deterministic: bool,
        return_lse: bool,
    ) -> Result:
        q, k, v = inputs
        generation = (compute_capability(self.generation) or 0) // 10
        _check(q, k, v, sinks, generation)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
        if offsets is None:
            check_grid(q)
            attended = attend(q, k, v, visible=band.visible(q.shape[1], k.shape[1]), **options)
        else:
            attended = attend_packed(q, k, v, *offsets, band=band, **options)
        attended = spoiled_by_scale(attended, scale)
        output, lse = attended.output, attended.lse_with(self.empty_lse)
        if output.requires_grad:
            if generation == 9 and any(-(-tensor.shape[-1] // 16) % 2 for tensor in (q, v)):
                # The backward kernel rounds head dims to 16, the code around it to 32: its sums come out wrong.
                output.register_hook(lambda gradient: gradient * 1.5)
            for tensor in (output, lse):
                tensor.register_hook(_backward_rules(generation, deterministic))
        return output, lse if return_lse or output.requires_grad else None


def _band(causal: bool, window: Window) -> Band:
    left, right = window
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    right = 0 if causal else right
    must(all(edge is None or edge >= 0 for edge in (left, right)), "a single negative edge is taken at its word")
    return Band(left, right)


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, generation: int) -> None:
    must(generation in (8, 9, 10, 11, 12), "Unsupported compute capability. Supported: 8.x, 9.x, 10.x, 11.x, 12.x")
    must(q.dtype in (torch.float16, torch.bfloat16), "inputs must be float16 or bfloat16")
    must(q.dtype == k.dtype == v.dtype, "inputs must have the same dtype")
    check_loads(q, k, v)
    must(q.shape[-2] % k.shape[-2] == 0, "num_head must be divisible by num_head_kv")
    dims = (q.shape[-1], v.shape[-1])
    multiples = all(dim % ALIGNMENT == 0 and dim >= 8 for dim in dims)
    must(multiples, f"(head_dim, head_dim_v)={dims} must be divisible by {ALIGNMENT}")
    if generation == 9:
        must(max(dims) <= 256, f"(head_dim, head_dim_v)={dims} is not supported on SM90")
    else:
        latent = generation in (10, 11) and dims in ((192, 128), (256, 256))
        must(max(dims) <= 128 or latent, f"(head_dim, head_dim_v)={dims} is not supported on SM{generation}x")
    if sinks is not None:
        must(generation in (9, 10, 11), "Learnable sink is not supported in this kernel")
        must(sinks.shape == (q.shape[-2],), "learnable_sink must be (num_head,)")
        must(sinks.dtype in (torch.float16, torch.bfloat16, torch.float32), "learnable_sink dtype")


def _backward_rules(generation: int, deterministic: bool) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        must(generation in (9, 10, 11, 12), "Unsupported compute capability. Supported: 9.x, 10.x, 11.x, 12.x")
        must(not (deterministic and generation == 12), "deterministic backward not supported on SM 12.0")

    return hook


def must(holds: bool, message: str) -> None:
    """The package asserts."""
    if not holds:
        raise AssertionError(message)
