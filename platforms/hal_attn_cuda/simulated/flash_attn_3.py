"""FlashAttention 3's functions on the CPU: the wheel fa3-fwd 0.0.3, a full build, and an older release."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NoReturn

import torch
from torch import Tensor

from hal_attn.simulation.aten import ALIGNMENT, host_offsets, must
from hal_attn.simulation.attention import Band, attend, attend_packed, check_loads, spoiled_by_scale
from hal_attn_cuda.flash_attn_3 import FlashAttention3

Pair = tuple[Tensor, Tensor]
Window = tuple[int, int]
Packed = tuple[Tensor, Tensor, int, int]
# What fa3-fwd 0.0.3 says that it was compiled without; other flags of its config are False.
FORWARD_ONLY = {
    "FLASHATTENTION_DISABLE_BACKWARD": True,
    "FLASHATTENTION_DISABLE_PAGEDKV": True,
    "FLASHATTENTION_DISABLE_LOCAL": True,
    "FLASHATTENTION_DISABLE_FP16": True,
    "FLASHATTENTION_DISABLE_SOFTCAP": False,
    "FLASHATTENTION_DISABLE_SM8x": False,
}


def simulated_flash_attn_3(kind: str, generation: str, empty_lse: float | None = None) -> FlashAttention3:
    """FlashAttention 3 as `kind`: "fa3_fwd", "full" or "old"; a row without keys gives LSE -inf, or `empty_lse`."""
    wheel = kind == "fa3_fwd"
    flags = FORWARD_ONLY if wheel else {}
    kernel = Kernel(flags, generation, -math.inf if empty_lse is None else empty_lse)
    if kind == "old":
        functions = {"flash_attn_func": kernel.old_func, "flash_attn_varlen_func": kernel.old_varlen_func}
        module = SimpleNamespace(**functions, _flash_attn_forward=kernel.old_forward)
    else:
        module = SimpleNamespace(
            flash_attn_func=kernel.flash_attn_func, flash_attn_varlen_func=kernel.flash_attn_varlen_func
        )
    name, operator = ("fa3-fwd", kernel.operator) if wheel else ("flash-attn-3", None)
    return FlashAttention3(module, name, flags, operator)


@dataclass(frozen=True)
class Kernel:
    """One build on one device; its methods are the package's functions, and the operator of fa3-fwd below them."""

    flags: dict[str, bool]
    generation: str
    empty_lse: float

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: Window = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Tensor | Pair:
        pair = self._run((q, k, v), None, softmax_scale, causal, window_size, softcap, deterministic)
        return pair if return_attn_probs else pair[0]

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: Window = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Tensor | Pair:
        packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        pair = self._run((q, k, v), packed, softmax_scale, causal, window_size, softcap, deterministic)
        return pair if return_attn_probs else pair[0]

    def old_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: Window = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> Tensor:
        return self._run((q, k, v), None, softmax_scale, causal, window_size, softcap, deterministic)[0]

    def old_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: Window = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> Tensor:
        packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return self._run((q, k, v), packed, softmax_scale, causal, window_size, softcap, deterministic)[0]

    def old_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_new: Tensor | None,
        v_new: Tensor | None,
        qv: Tensor | None,
        out: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        cu_seqlens_k_new: Tensor | None,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        page_table: Tensor | None,
        kv_batch_idx: Tensor | None,
        leftpad_k: Tensor | None,
        rotary_cos: Tensor | None,
        rotary_sin: Tensor | None,
        seqlens_rotary: Tensor | None,
        q_descale: Tensor | None,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        softmax_scale: float,
        causal: bool,
        window_size: Window = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        packed: Packed | None = None
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q or 0, max_seqlen_k or 0)
        nothing = torch.empty(0)
        return (*self._run((q, k, v), packed, softmax_scale, causal, window_size, softcap, False), nothing, nothing)

    def operator(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
        q_v: Tensor | None = None,
        out: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        page_table: Tensor | None = None,
        kv_batch_idx: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        seqlens_rotary: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        attention_chunk: int = 0,
        softcap: float = 0.0,
        is_rotary_interleaved: bool = False,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        must(not (torch.is_grad_enabled() and q.requires_grad), "the operator has no gradient")
        must(num_splits == 1, "with another number of splits a result depends on how many multiprocessors there are")
        packed: Packed | None = None
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q or 0, max_seqlen_k or 0)
        window, nothing = (window_size_left, window_size_right), torch.empty(0)
        return (*self._run((q, k, v), packed, softmax_scale, is_causal, window, softcap, False), nothing, nothing)

    def _run(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        packed: Packed | None,
        scale: float | None,
        causal: bool,
        window: Window,
        softcap: float,
        deterministic: bool,
    ) -> Pair:
        q, k, v = inputs
        self._check(q, k, v, window, causal)
        band = Band(window[0], 0 if causal else window[1])
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        options = {"scale": scale, "softcap": softcap}
        if packed is None:
            attended = attend(q, k, v, visible=band.visible(q.shape[1], k.shape[1]), **options)  # type: ignore[arg-type]
        else:
            offsets = (host_offsets(packed[0], packed[2]), host_offsets(packed[1], packed[3]))
            attended = attend_packed(q, k, v, *offsets, band=band, **options)  # type: ignore[arg-type]
        attended = spoiled_by_scale(attended, scale)
        output = attended.output
        if output.requires_grad:
            if self.flags.get("FLASHATTENTION_DISABLE_BACKWARD"):
                output.register_hook(_fail("This flash attention build does not support backward."))
            if deterministic and q.shape[-1] > 192:
                output.register_hook(_fail("Deterministic backward is not supported for hdim 256"))
        return output, attended.lse_with(self.empty_lse).detach()

    def _check(self, q: Tensor, k: Tensor, v: Tensor, window: Window, causal: bool) -> None:
        built = "This flash attention build does not support"
        ampere = self.generation.startswith("sm8") and self.flags.get("FLASHATTENTION_DISABLE_SM8x") is False
        must(self.generation == "sm90" or ampere, f"no kernel image for {self.generation}")
        must(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only supports fp16, bf16, and fp8_e4m3")
        half = q.dtype == torch.float16 and self.flags.get("FLASHATTENTION_DISABLE_FP16")
        must(not half, f"{built} FP16.")
        local = window[0] >= 0 or (window[1] >= 0 and not causal)
        must(not (local and self.flags.get("FLASHATTENTION_DISABLE_LOCAL")), f"{built} local attention.")
        must(q.dtype == k.dtype == v.dtype, "query and key must have the same dtype")
        must(all(tensor.stride(-1) == 1 for tensor in (q, k, v)), "Input tensor must have contiguous last dimension")
        check_loads(q, k, v)
        dim = q.shape[-1]
        must(dim <= 256 and dim % ALIGNMENT == 0, "head_size should be a multiple of 8 of at most 256")
        must(v.shape[-1] == dim, "the simulation has no other head dim of value")
        must(q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")


def _fail(message: str) -> Callable[[Tensor], NoReturn]:
    def hook(gradient: Tensor) -> NoReturn:
        raise RuntimeError(message)

    return hook
