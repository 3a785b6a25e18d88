"""The ring hook for any backend: one rotated KV chunk by its own packed or batched attention, with the LSE."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from hal_attn.backend import AttentionBackend
from hal_attn.errors import UnsupportedAttentionError
from hal_attn.native import native_call
from hal_attn.packing import PackedSequences
from hal_attn.padded import plan_maker, run_plan


class RingBackend(AttentionBackend):
    """A backend that returns the LSE; its ring hook is its packed attention, or batched calls where it has none."""

    def forward_ring_kv_chunk(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sequences: PackedSequences | None = None,
        scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] | None = None,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        from hal_attn.validation import packed_request

        if sequences is None:
            lengths_k = None if key.shape[0] == query.shape[0] else [key.shape[0]]
            sequences = PackedSequences.from_lengths([query.shape[0]], lengths_k)
        options = {
            "scale": scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
            "return_lse": True,
        }
        request = packed_request(query, key, value, sequences, options)
        refusals = self.refusals(request)
        if refusals:
            message = f"{self.name} does not take this ring chunk ({request.describe()})"
            raise UnsupportedAttentionError(message, [(self.name, refusals)])
        with torch.autocast(query.device.type, enabled=False):
            if self.implements("forward_varlen"):
                result = native_call(self, request)(query, key, value, sequences)
            else:
                plan = plan_maker(self, request)(sequences)
                result = run_plan(self, plan, query, key, value, request.options())
        return cast("tuple[Tensor, Tensor]", result)
