"""The ring hook for backends that know batches only: one KV chunk through the padded route."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from hal_attn.backend import AttentionBackend
from hal_attn.packing import PackedSequences
from hal_attn.padded import run_padded_attention


class BatchedBackend(AttentionBackend):
    """A backend of batched calls that returns the LSE; its ring hook packs the chunk into such calls."""

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
        if sequences is None:
            lengths_k = None if key.shape[0] == query.shape[0] else [key.shape[0]]
            sequences = PackedSequences.from_lengths([query.shape[0]], lengths_k)
        result = run_padded_attention(
            self,
            query,
            key,
            value,
            sequences,
            scale=scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            return_lse=True,
        )
        return cast("tuple[Tensor, Tensor]", result)
