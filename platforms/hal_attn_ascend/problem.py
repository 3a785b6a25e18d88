"""What of a call decides which operator takes it, from a request or from the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal_attn.kernels import KernelCall
from hal_attn.masks import edges
from hal_attn.request import AttentionRequest
from hal_attn_ascend.metadata import AscendMetadata


@dataclass(frozen=True)
class Problem:
    """Shapes and options of one call.

    Attributes:
        sequences: batch, or number of packed sequences.
        longest_q, longest_k: the longest query and key length, `tokens` the most rows of a packed tensor.
        left, right: the band, aligned bottom right, -1 unlimited.
        more_queries: packed, and some sequence has, or may have, more queries than keys.
        training: gradients or dropout.
    """

    dtype: torch.dtype
    packed: bool
    sequences: int
    longest_q: int
    longest_k: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    left: int
    right: int
    more_queries: bool
    masked: bool
    training: bool

    @classmethod
    def of_request(cls, request: AttentionRequest) -> Problem:
        """Lengths that only the device knows are the caller's maximum, or all rows where that is less."""
        left, right = edges(request.causal, request.window_size)
        longest_q = request.tokens_q if request.seqlen_q is None else min(request.seqlen_q, request.tokens_q)
        longest_k = request.tokens_k if request.seqlen_k is None else min(request.seqlen_k, request.tokens_k)
        return cls(
            request.dtype,
            request.packed,
            request.batch,
            longest_q,
            longest_k,
            max(request.tokens_q, request.tokens_k),
            request.heads,
            request.kv_heads,
            request.head_dim,
            request.value_head_dim,
            left,
            right,
            request.packed and not request.equal_lengths,
            request.mask != "none" or request.key_padding_mask,
            request.wants_gradient or request.dropout_p > 0,
        )

    @classmethod
    def of_call(cls, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> Problem:
        """Of an adapter's `run`: `[B, S, H, D]` or `[T, H, D]`."""
        metadata = call.metadata
        if isinstance(metadata, AscendMetadata):
            lengths = (len(metadata.ends_q), metadata.longest_q, metadata.longest_k)
        else:
            lengths = (query.shape[0], query.shape[1], key.shape[1])
        tensors = (query, key, value) if call.sinks is None else (query, key, value, call.sinks)
        return cls(
            query.dtype,
            metadata is not None,
            *lengths,
            max(query.shape[0], key.shape[0]),
            query.shape[-2],
            key.shape[-2],
            query.shape[-1],
            value.shape[-1],
            call.left,
            call.right,
            isinstance(metadata, AscendMetadata) and metadata.more_queries,
            call.masks is not None,
            call.dropout_p > 0 or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)),
        )
