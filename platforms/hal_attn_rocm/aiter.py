"""`aiter`: AMD's AITER, Composable Kernel (CK) and assembly by its own dispatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal_attn.capabilities import Capabilities
from hal_attn.errors import UnsupportedAttentionError
from hal_attn.kernels import (
    BatchedKernel,
    KernelCall,
    KernelResult,
    PackedKernel,
    PackedMetadata,
    PackedMetadataBuilder,
)
from hal_attn.masks import edges
from hal_attn.packing import PackedSequences
from hal_attn.portable.flash_rules import positive_scale_rule
from hal_attn.portable.operators import last_contiguous, wants_gradient
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn_rocm.rules import CK_ARCHITECTURES, architecture_rule, right_edge_rule

ASSEMBLY_ARCHITECTURES = ("gfx942", "gfx950")
ROUND_TO_NEAREST_EVEN = 0
SOFTCAP_GRADIENT = Refusal("gradients", "softcap with gradients", "inference, AITER's backward pass leaves it out")


@dataclass(frozen=True, kw_only=True)
class AiterMetadata(PackedMetadata):
    """A packed batch as AITER's packed functions take it: `arguments` are its offsets and lengths by name.

    `min_seqlen_q` is 0 whatever the lengths: the kernels leave out every sequence with at most that many queries.
    `max_seqlen_k` is above the right edge of the window, which would otherwise be taken as unlimited; nothing else
    depends on it but how many blocks of keys the backward pass starts.
    """

    arguments: Mapping[str, Any]


class AiterMetadataBuilder(PackedMetadataBuilder):
    """Makes `AiterMetadata`."""

    def build(self, sequences: PackedSequences, request: AttentionRequest) -> AiterMetadata:
        prepared = super().build(sequences, request)
        offsets, offsets_k = sequences.offsets(request.device)
        _, right = edges(request.causal, request.window_size)
        lengths = (sequences.max_seqlen, max(sequences.max_seqlen_k, right + 1))
        arguments = _packed_arguments(offsets, offsets_k, *lengths)
        return AiterMetadata(sequences, request.device, prepared.blind, arguments=arguments)


class AiterBackend(BatchedKernel, PackedKernel):
    """`aiter.flash_attn_func`, `flash_attn_varlen_func` of amd-aiter 0.1.7 (aiter/ops/mha.py and the C++ beneath it).

    Its rules: float16 and bfloat16; head dims of at most 256, padded to a multiple of 8, one for query, key and value,
    because CK has no other pair with every option; causal and windows aligned to the bottom right; ALiBi slopes in
    float32; one bias `[Sq, Sk]` for all batches and heads, which is how masks of that shape run, batched only and not
    with ALiBi; gradients only where the LSE is asked for; `deterministic` is about the backward pass. A row without
    keys gives LSE -inf. The backward pass of a masked call keeps a gradient of the bias, `[B, Sq, H, Sk]`.

    softcap is a parameter of the packed function only, without bias or ALiBi, and its backward pass leaves it out:
    inference, by CK's own packed function, to which a batch is one packed batch of equal lengths.

    Its dispatch takes assembly for bfloat16 with head dim 128 without looking at softcap, at the device's generation
    (assembly is there for gfx942 and gfx950) or at a window with a left edge of 0, and in the backward pass for windows
    that gfx950 has no kernel for. Its source also says that assembly's triangle hangs from the top left in the backward
    pass. `_assembly_fails` knows those calls; they are given slopes of 0, which add nothing and send both passes to CK.
    """

    name = "aiter"
    distribution = "amd-aiter"
    install = "pip install 'hal-attn[rocm]'"
    head_dim_multiple = 8
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        max_head_dim=256,
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        masks=frozenset({"bool", "float"}),
        mask_dtype_of_query=True,
        key_padding_mask=True,
        softcap=True,
        sinks=True,
        alibi_slopes=True,
        dropout=True,
        deterministic=True,
        lse=True,
        gradients=True,
    )

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        refusals = super().refusals(request)
        refusals += architecture_rule(self.architecture(request.device), CK_ARCHITECTURES, "AITER's CK")
        if not request.packed:
            refusals += right_edge_rule(request)
        return refusals + positive_scale_rule(request) + _bias_rules(request)

    def metadata_builder(self) -> AiterMetadataBuilder:
        return AiterMetadataBuilder()

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        if call.softcap > 0:
            return self._capped(query, key, value, call)
        gradients = wants_gradient(query, key, value)
        bias = _bias(call, query.shape[1], key.shape[1])
        slopes = None if call.alibi_slopes is None else call.alibi_slopes.float().contiguous()
        if slopes is None and bias is None and self._assembly_fails(query, key, call, gradients):
            slopes = torch.zeros(query.shape[-2], dtype=torch.float32, device=query.device)
        # Always by keyword: the two functions differ from each other, and from FlashAttention, in the order.
        options: dict[str, Any] = {
            "dropout_p": call.dropout_p,
            "softmax_scale": call.scale,
            "causal": call.right == 0,
            "window_size": (call.left, call.right),
            "bias": bias,
            "alibi_slopes": slopes,
            "deterministic": call.deterministic,
            "return_lse": call.needs_lse or gradients,
            "how_v3_bf16_cvt": ROUND_TO_NEAREST_EVEN,
        }
        if call.metadata is None:
            result = self.library.flash_attn_func(query, key, value, **options)
        else:
            assert isinstance(call.metadata, AiterMetadata)
            result = self.library.flash_attn_varlen_func(query, key, value, **call.metadata.arguments, **options)
        return result if options["return_lse"] else (result, None)

    def _capped(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        """A call with softcap, by CK's packed function itself: the one above it may take assembly, which has none."""
        if wants_gradient(query, key, value):
            raise UnsupportedAttentionError(f"{self.name}: softcap with gradients", [(self.name, (SOFTCAP_GRADIENT,))])
        rows = [last_contiguous(tensor) for tensor in (query, key, value)]
        if call.metadata is None:
            batch, *lengths = query.shape[0], query.shape[1], key.shape[1]
            rows = [tensor.flatten(0, 1) for tensor in rows]
            offsets, offsets_k = (_equal_offsets(batch, length, query.device) for length in lengths)
            arguments: Mapping[str, Any] = _packed_arguments(offsets, offsets_k, *lengths)
        else:
            assert isinstance(call.metadata, AiterMetadata)
            arguments = call.metadata.arguments
        output, lse, *_ = self.library.mha_varlen_fwd(
            *rows,
            **arguments,
            dropout_p=0.0,
            softmax_scale=call.scale,
            logits_soft_cap=call.softcap,
            zero_tensors=False,
            is_causal=call.right == 0,
            window_size_left=call.left,
            window_size_right=call.right,
            return_softmax_lse=call.needs_lse,
            return_dropout_randval=False,
        )
        if call.metadata is None:
            output = output.unflatten(0, (batch, lengths[0]))
            lse = lse.unflatten(1, (batch, lengths[0])).transpose(0, 1) if call.needs_lse else lse
        return output, lse if call.needs_lse else None

    def _assembly_fails(self, query: Tensor, key: Tensor, call: KernelCall, gradients: bool) -> bool:
        """Whether AITER would take assembly for a call that assembly does not have, or not surely right."""
        if call.dropout_p > 0:
            return False
        here = self.architecture(query.device) in ASSEMBLY_ARCHITECTURES
        head_dim = query.shape[-1]
        if gradients and here and 64 <= head_dim <= 192:
            if call.left >= 0 or call.right > 0:
                return True
            if call.right == 0 and not _equal_lengths(query, key, call):
                return True
        seen_as_window = call.left > 0 or call.right > 0
        if seen_as_window or query.dtype != torch.bfloat16 or head_dim != 128:
            return False
        return call.left == 0 or not here


def _bias_rules(request: AttentionRequest) -> tuple[Refusal, ...]:
    """What one bias for all batches and heads cannot say, and what no kernel has together."""
    refusals: tuple[Refusal, ...] = ()
    masked = request.mask != "none" or request.key_padding_mask
    batch, heads = (1, 1) if request.mask_shape is None else request.mask_shape[:2]
    if batch > 1 or heads > 1:
        refusals += (
            Refusal("mask", f"a mask of {batch} batches and {heads} heads", "one mask [1, 1, Sq, Sk] for all"),
        )
    if request.key_padding_mask and request.batch > 1:
        hint = "pack the sequences instead: varlen_attention"
        refusals += (Refusal("key_padding_mask", f"one for {request.batch} batches", "a batch of 1", hint),)
    if masked and request.alibi_slopes:
        refusals += (Refusal("alibi_slopes", "given with a mask", "one of the two"),)
    if request.softcap > 0:
        others = {"mask": masked, "alibi_slopes": request.alibi_slopes > 0, "dropout_p": request.dropout_p > 0}
        for name in (name for name, given in others.items() if given):
            refusals += (Refusal("softcap", f"{request.softcap} with {name}", "one of the two"),)
        if request.needs_grad:
            refusals += (SOFTCAP_GRADIENT,)
    return refusals


def _bias(call: KernelCall, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """The masks as AITER's bias `[Sq, Sk]`, in the dtype of query, which it does not check; the band goes beside it."""
    if call.masks is None or call.masks.added is None:
        return None
    added = call.masks.added
    if added.shape[:2] != (1, 1):
        reason = Refusal("mask", f"a mask of shape {tuple(added.shape)}", "one mask [1, 1, Sq, Sk] for all")
        raise UnsupportedAttentionError(f"aiter: {reason}", [("aiter", (reason,))])
    return added[0, 0].expand(seqlen_q, seqlen_k).contiguous()


def _packed_arguments(offsets: Tensor, offsets_k: Tensor, longest: int, longest_k: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets_k,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest_k,
        "min_seqlen_q": 0,
    }


def _equal_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * length, max(length, 1), dtype=torch.int32, device=device)


def _equal_lengths(query: Tensor, key: Tensor, call: KernelCall) -> bool:
    if call.metadata is None:
        return query.shape[1] == key.shape[1]
    return call.metadata.sequences.equal_lengths
