"""The backward function of FlashAttention 4 on the CPU, under the signature and limits of flash-attn-4 4.0.0b36."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hal_attn.portable.generation import compute_capability
from hal_attn.simulation.aten import host_offsets, must
from hal_attn.simulation.attention import Band, partial_gradients_packed


def simulated_interface(generation: str) -> SimpleNamespace:
    """`flash_attn.cute.interface` on a device of `generation`, as far as adapters call it."""

    def _flash_attn_bwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float = 0.0,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        m_block_size: int = 64,
        n_block_size: int = 128,
        num_threads: int = 256,
        pack_gqa: bool = False,
        num_stages_Q: int = 2,
        num_stages_dO: int = 2,
        SdP_swapAB: bool = False,
        dKV_swapAB: bool = False,
        dQ_swapAB: bool = False,
        AtomLayoutMSdP: int = 2,
        AtomLayoutNdKV: int = 2,
        AtomLayoutMdQ: int = 2,
        V_in_regs: bool = False,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        deterministic: bool = False,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bwd: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        aux_tensors: list[Tensor] | None = None,
        aux_scalars: tuple[Any, ...] | None = None,
        block_sparse_tensors: Any = None,
        dlse: Tensor | None = None,
        learnable_sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        capability = (compute_capability(generation) or 0) // 10
        must(capability in (9, 10, 11, 12), "Unsupported compute capability. Supported: 9.x, 10.x, 11.x, 12.x")
        must(cu_seqlens_q is not None and cu_seqlens_k is not None, "the simulation packs queries and keys")
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        offsets = (host_offsets(cu_seqlens_q, max_seqlen_q or 0), host_offsets(cu_seqlens_k, max_seqlen_k or 0))
        band = Band(window_size_left, 0 if causal else window_size_right)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return partial_gradients_packed(dout, q, k, v, out, lse, *offsets, band=band, scale=scale)

    return SimpleNamespace(_flash_attn_bwd=_flash_attn_bwd)
