"""`flash_attn` on AMD devices: FlashAttention 2 over Composable Kernel, or over Triton where that is switched on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hal_attn.errors import UnsupportedAttentionError
from hal_attn.kernels import KernelCall, KernelResult
from hal_attn.portable.flash_attn import FlashAttentionBackend
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn_rocm.aiter_triton import batched_slopes
from hal_attn_rocm.rules import CK_ARCHITECTURES, architecture_rule

SWITCH = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
CK_HINT = f"unset {SWITCH} where flash-attn was built for CK"


class RocmFlashAttentionBackend(FlashAttentionBackend):
    """flash-attn 2.8.3 built for ROCm (csrc/flash_attn_ck and flash_attn/flash_attn_triton_amd).

    Both take the parameters of the CUDA build and leave some of them unread. CK leaves softcap unread. Triton leaves
    softcap and windows unread, has one fixed dropout pattern for all calls, drops `deterministic`, and takes ALiBi
    slopes `[B, H]` only. What is not read is refused here. CK is built for MI200, MI300 and MI350; Triton also runs on
    gfx11 and gfx12.

    Args:
        uses_triton: whether the library runs over Triton; asked at each call, because flash-attn settles it at import.
    """

    capabilities = replace(FlashAttentionBackend.capabilities, softcap=False)
    triton_capabilities = replace(capabilities, window=False, dropout=False, deterministic=False)

    def __init__(
        self,
        library: Callable[[], Any],
        architecture: Callable[[torch.device], str],
        uses_triton: Callable[[], bool],
    ) -> None:
        super().__init__(library, architecture)
        self.uses_triton = uses_triton

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        refusals = super().refusals(request)
        if self.uses_triton():
            of_triton = (replace(r, hint=r.hint or CK_HINT) for r in self.triton_capabilities.refusals(request))
            known = {refusal.rule for refusal in refusals}
            return refusals + tuple(refusal for refusal in of_triton if refusal.rule not in known)
        return refusals + architecture_rule(self.architecture(request.device), CK_ARCHITECTURES, "flash-attn over CK")

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        if self.uses_triton():
            self._check_triton(call)
            call = replace(call, alibi_slopes=batched_slopes(query, call))
        return super().run(query, key, value, call)

    def _check_triton(self, call: KernelCall) -> None:
        """A call that was bound while the library ran over CK."""
        unread = {
            "window_size": call.left >= 0 or call.right > 0,
            "dropout_p": call.dropout_p > 0,
            "deterministic": call.deterministic,
        }
        refusals = tuple(Refusal(name, "given", "off over Triton", CK_HINT) for name, given in unread.items() if given)
        if refusals:
            raise UnsupportedAttentionError(f"{self.name} runs over Triton", [(self.name, refusals)])


def flash_attn_uses_triton() -> bool:
    """Whether flash-attn runs over Triton: what it settled at import, or would by the environment."""
    interface = sys.modules.get("flash_attn.flash_attn_interface")
    settled = getattr(interface, "USE_TRITON_ROCM", None)
    return os.environ.get(SWITCH, "FALSE") == "TRUE" if settled is None else bool(settled)
