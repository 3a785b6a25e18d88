"""A backend that is right in everything, packed and batched, small enough to be made wrong in one place."""

from __future__ import annotations

from typing import Any

import torch
from hal_attn_cpu.math import CpuMathBackend
from torch import Tensor

from hal_attn.chunked import chunked_attention
from hal_attn.ring import RingBackend


class Working(RingBackend):
    """What `cpu_math` computes, with a packed hook of its own; a copy overrides `attend`, `rows` or a hook."""

    name = "working"
    capabilities = CpuMathBackend.capabilities

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """`[B, S, H, D]` -> output and LSE `[B, H, Sq]`."""
        return chunked_attention(query, key, value, **options)

    def rows(self, offsets: tuple[int, ...], index: int) -> slice:
        """The key rows of sequence `index`."""
        return slice(offsets[index], offsets[index + 1])

    def forward(self, query, key, value, *, return_lse=False, deterministic=False, **options):
        output, lse = self.attend(query, key, value, **options)
        return (output, lse) if return_lse else output

    def forward_varlen(
        self,
        query,
        key,
        value,
        *,
        cu_seqlens,
        max_seqlen,
        cu_seqlens_host=None,
        cu_seqlens_k=None,
        max_seqlen_k=None,
        cu_seqlens_k_host=None,
        return_lse=False,
        deterministic=False,
        alibi_slopes=None,
        **options,
    ):
        offsets = tuple(cu_seqlens.tolist())
        offsets_k = offsets if cu_seqlens_k is None else tuple(cu_seqlens_k.tolist())
        outputs, lses = [], []
        for index in range(len(offsets) - 1):
            own = slice(offsets[index], offsets[index + 1])
            keys = self.rows(offsets_k, index)
            slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[index]
            parts = (query[own][None], key[keys][None], value[keys][None])
            output, lse = self.attend(*parts, **options, alibi_slopes=slopes)
            outputs.append(output[0])
            lses.append(lse[0])
        output = torch.cat(outputs)
        return (output, torch.cat(lses, 1)) if return_lse else output
