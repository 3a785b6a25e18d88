"""`acme_packed`: Acme's packed kernel, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hal_attn import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionRequest,
    Capabilities,
    PackedSequences,
    Refusal,
    UnsupportedAttentionError,
)
from torch import Tensor

Result = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AcmeMetadata(AttentionMetadata):
    """Where each sequence ends, as the kernel wants it."""

    ends: tuple[int, ...]
    ends_k: tuple[int, ...]


class AcmeMetadataBuilder(AttentionMetadataBuilder):
    """Makes `AcmeMetadata` from the lengths of a batch."""

    def build(self, sequences: PackedSequences, request: AttentionRequest) -> AcmeMetadata:
        return AcmeMetadata(sequences, request.device, *_ends(sequences))

    def key(self, request: AttentionRequest) -> object:
        return request.device


class AcmePackedBackend(AttentionBackend):
    """`packed_attention`: inference, a top-left triangle, one head dimension for query, key and value.

    Args:
        library: gives the vendor's functions, at the first use.
    """

    name = "acme_packed"
    install = "pip install hal-attn-acme"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32}),
        max_head_dim=256,
        head_dim_multiple=8,
        causal="square",
        lse=True,
    )

    def __init__(self, library: Callable[[], Any]) -> None:
        self._library = library

    def unavailable(self) -> Refusal | None:
        if hasattr(self._library(), "packed_attention"):
            return None
        return Refusal("installed", "acme_torch without packed_attention", "acme_torch 2 or later", self.install)

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        reasons = self.capabilities.refusals(request)
        if request.tokens_q >= 2**31:
            reasons += (Refusal("query", f"{request.tokens_q} rows", "fewer than 2^31 rows"),)
        return reasons

    def metadata_builder(self) -> AttentionMetadataBuilder:
        return AcmeMetadataBuilder()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        return_lse: bool = False,
    ) -> Result:
        batch, seqlen_q = query.shape[:2]
        rows = [tensor.flatten(0, 1) for tensor in (query, key, value)]
        ends, ends_k = (tuple(accumulate([length] * batch)) for length in (seqlen_q, key.shape[1]))
        output, lse = self._run(rows[0], rows[1], rows[2], ends, ends_k, scale, causal)
        output = output.unflatten(0, (batch, seqlen_q))
        return (output, lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)) if return_lse else output

    def forward_varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cu_seqlens_host: tuple[int, ...] | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
        cu_seqlens_k_host: tuple[int, ...] | None = None,
        metadata: AcmeMetadata,
        scale: float | None = None,
        causal: bool = False,
        return_lse: bool = False,
    ) -> Result:
        output, lse = self._run(query, key, value, metadata.ends, metadata.ends_k, scale, causal)
        return (output, lse) if return_lse else output

    def forward_ring_kv_chunk(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sequences: PackedSequences | None = None,
        scale: float | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        ends, ends_k = ((query.shape[0],), (key.shape[0],)) if sequences is None else _ends(sequences)
        if causal and ends != ends_k:
            rule = Refusal(
                "causal", "a chunk whose keys are not its queries'", "equal lengths, its triangle is top-left"
            )
            raise UnsupportedAttentionError("acme_packed does not take this ring chunk", [(self.name, (rule,))])
        return self._run(query, key, value, ends, ends_k, scale, causal)

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Sequence[int],
        ends_k: Sequence[int],
        scale: float | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """The kernel, in the conventions of hal_attn: output `[T, H, D]`, natural LSE `[H, T]` in float32."""
        factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        output, lse = self._library().packed_attention(query, key, value, ends, ends_k, factor, causal)
        return output, (lse.double() * math.log(2)).float().transpose(0, 1)


def _ends(sequences: PackedSequences) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(accumulate(sequences.lengths)), tuple(accumulate(sequences.lengths_k))
