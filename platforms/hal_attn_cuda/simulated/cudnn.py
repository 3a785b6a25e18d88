"""cuDNN's attention as PyTorch has it, and its gradients, on the CPU, under the schemas of PyTorch 2.13."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hal_attn.simulation.aten import ALIGNMENT, must
from hal_attn.simulation.attention import Band, attend, check_loads, partial_gradients_packed, spoiled_by_scale

Result = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, None]


def simulated_cudnn(generation: str, empty_lse: float | None = None) -> SimulatedCudnn:
    """The operator on a device of `generation`; a row without keys gives NaN, and LSE NaN or `empty_lse`."""
    return SimulatedCudnn(generation, math.nan if empty_lse is None else empty_lse)


@dataclass(frozen=True)
class SimulatedCudnn:
    """The operators, as `torch.ops.aten` has them."""

    generation: str
    empty_lse: float

    def _scaled_dot_product_cudnn_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Result:
        self._check(query, key, value, dropout_p)
        if attn_bias is not None:
            _check_bias(attn_bias, query, key)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
            must(compute_log_sumexp, "the backward pass reads statistics that were not computed")
        seqlen_q, seqlen_k = query.shape[2], key.shape[2]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        attended = attend(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            scale=scale,
            visible=Band(right=0 if is_causal else None, top_left=True).visible(seqlen_q, seqlen_k),
            bias=None if attn_bias is None else attn_bias.detach(),
            dropout_p=dropout_p,
        )
        attended = spoiled_by_scale(attended, scale)
        blind = attended.empty.transpose(1, 2).unsqueeze(-1)
        output = torch.where(blind, math.nan, attended.output).transpose(1, 2)
        lse = attended.lse_with(self.empty_lse).detach()
        state = torch.zeros((), dtype=torch.long)
        statistics = lse.unsqueeze(-1) if compute_log_sumexp else lse[..., :0]
        return output, statistics, None, None, seqlen_q, seqlen_k, state, state, None

    def _scaled_dot_product_cudnn_attention_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        attn_bias: Tensor | None,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        must(dropout_p == 0.0 and attn_bias is None, "the simulation has neither dropout nor a bias here")
        must(cum_seq_q is None and cum_seq_k is None, "offsets make the operator read its tensors as packed ones")
        self._check(query, key, value, dropout_p)
        must(max(query.shape[-1], value.shape[-1]) <= 128, "head_dim should be no more than 128 with gradients")
        must((max_q, max_k) == (query.shape[2], key.shape[2]), "the lengths must be those of the tensors")
        must(grad_out.shape == out.shape == (*query.shape[:3], value.shape[3]), "output: wrong shape")
        # The graph is built with the order of query's dimensions for both.
        rows = [tensor.transpose(1, 2) for tensor in (grad_out, query, key, value, out)]
        must(all(tensor.is_contiguous() == rows[1].is_contiguous() for tensor in (rows[0], rows[4])), "wrong layout")
        must(logsumexp.shape == (*query.shape[:3], 1) and logsumexp.is_contiguous(), "logsumexp: wrong shape or layout")
        must(logsumexp.dtype == torch.float32, "logsumexp: wrong dtype")
        check_loads(grad_out, out)
        offsets = [range(0, (len(query) + 1) * length, length) for length in (max_q, max_k)]
        grad_out, query, key, value, out = (tensor.flatten(0, 1) for tensor in rows)
        grads = partial_gradients_packed(
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp.squeeze(-1).transpose(0, 1).flatten(1),
            *offsets,
            band=Band(right=0 if is_causal else None, top_left=True),
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
        )
        found = [grad.unflatten(0, (len(rows[1]), -1)).transpose(1, 2) for grad in grads]
        return found[0], found[1], found[2]

    def _check(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> None:
        must(query.dtype in (torch.float16, torch.bfloat16), "cuDNN attention supports fp16 and bf16")
        must(query.dtype == key.dtype == value.dtype, "query, key and value must have one dtype")
        limit = 256 if self.generation == "sm90" else 128
        dims = (query.shape[-1], value.shape[-1])
        must(max(dims) <= limit, f"head_dim should be no more than {limit}")
        must(all(dim % ALIGNMENT == 0 for dim in dims), "head_dim should be a multiple of 8")
        must(query.shape[1] % key.shape[1] == 0, "query heads must be a multiple of key heads")
        must(key.shape[2] > 1, "cudnn SDPA does not support key/value sequence length 1.")
        must(not (query.shape[2] == 1 and dropout_p), "cudnn SDPA does not support query length 1 with dropout.")
        must(all(tensor.stride(-1) == 1 for tensor in (query, key, value)), "the last dimension must have stride 1")
        check_loads(query, key, value)


def _check_bias(bias: Tensor, query: Tensor, key: Tensor) -> None:
    must(bias.dtype == query.dtype, "the bias must have the dtype of query")
    must(bias.dim() == 4 and bias.shape[2:] == (query.shape[2], key.shape[2]), "attn_bias: wrong shape")
    broadcast = bias.shape[0] in (1, query.shape[0]) and bias.shape[1] in (1, query.shape[1])
    must(broadcast and bias.stride(3) == 1, "attn_bias: wrong shape or strides")
    check_loads(bias)
