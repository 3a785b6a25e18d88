"""`flash_attn_4`: FlashAttention 4, the `flash_attn.cute` of the package flash-attn-4."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hal_attn.capabilities import Capabilities
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult, PackedKernel, padded_head_dims, to_head_dim
from hal_attn.masks import edges
from hal_attn.packing import PackedSequences
from hal_attn.portable.flash_rules import positive_scale_rule
from hal_attn.portable.generation import MOST_IN_GRID, capability_rule, compute_capability, grid_rule
from hal_attn.portable.operators import aligned, wants_gradient
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

LATENT = (192, 128)
BACKWARD_MULTIPLE = 32


class FlashAttention4Backend(BatchedKernel, PackedKernel):
    """`flash_attn.cute.flash_attn_func` and `flash_attn_varlen_func` (rules read from flash-attn-4 4.0.0b36).

    Its rules: float16 and bfloat16; compute capabilities 8.x to 12.x; head dims padded to a multiple of 8 and to one
    another but for 192 over 128: at most 256 on sm9x, on sm10x and sm11x at most 128, or 256, on the others at most
    128. Causal and windows aligned to the bottom right; an unlimited edge is None, a single negative one is taken at
    its word; arguments by name, because the packed function has another order than its predecessors'. Sinks are its
    own, in the kernels of sm9x to sm11x. No dropout, no ALiBi. It always returns a pair; the LSE's gradient counts. A
    row without keys gives LSE -inf, or its sink.

    Where a gradient is wanted, head dims are padded to a multiple of 32: on sm9x the backward kernel rounds them to 16
    and the code that prepares its sums to 32, so that head dim 72 gave wrong gradients on an H200.

    A scale of 0 or below gives NaN (seen on an H200). There is no backward pass on sm8x, none that is deterministic on
    sm12x, and the one for head dim 256 on sm10x takes neither softcap, sinks nor the LSE's gradient.
    """

    name = "flash_attn_4"
    distribution = "flash-attn-4"
    install = "pip install flash-attn-4"
    head_dim_multiple = 8
    native_sinks = True
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        max_head_dim=256,
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        softcap=True,
        sinks=True,
        deterministic=True,
        lse=True,
        lse_gradient=True,
        gradients=True,
        option_gradients=frozenset({"sinks"}),
        # A tile of keys goes beyond the end of its sequence, where a weight of 0 times NaN is NaN (seen on an H200).
        sequences_isolated=False,
    )

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        architecture = self.architecture(request.device)
        refusals = super().refusals(request) + capability_rule(architecture, 80, "FlashAttention 4")
        refusals += positive_scale_rule(request)
        if not request.packed:
            refusals += grid_rule(request)
        capability = compute_capability(architecture)
        return refusals if capability is None else refusals + _generation_rules(request, capability // 10)

    def prefers_batched(self, request: AttentionRequest) -> bool:
        # On an H200 (4.0.0b36, bfloat16) the packed kernel took, over the same sequences: 64 of 512 1.15 times as long,
        # 20 of 1,500 1.06, 4 of 4,096 1.03, one of 32,768 1.01. The results were equal bit for bit. The batched one
        # counts sequences in the third dimension of its grid on sm9x (`SingleTileScheduler`), the packed one does not.
        return request.batch <= MOST_IN_GRID

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        options: dict[str, Any] = {
            "softmax_scale": call.scale,
            "causal": call.right == 0,
            "window_size": tuple(None if edge < 0 else edge for edge in (call.left, call.right)),
            "softcap": call.softcap,
            "learnable_sink": None if call.sinks is None else call.sinks.float(),
            "deterministic": call.deterministic,
            "return_lse": call.needs_lse,
        }
        rows = [aligned(tensor, self.head_dim_multiple) for tensor in (query, key, value)]
        if call.metadata is None:
            output, lse = self.library.flash_attn_func(*rows, **options)
            return output, lse
        sequences = call.metadata.sequences
        cu_seqlens, cu_seqlens_k = sequences.offsets(query.device)
        output, lse = self.library.flash_attn_varlen_func(
            *rows,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=sequences.max_seqlen,
            max_seqlen_k=sequences.max_seqlen_k,
            **options,
        )
        return output, lse

    def backward_varlen(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        *,
        sequences: PackedSequences,
        scale: float,
        causal: bool,
        window_size: tuple[int, int] | None,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """By the function that its own backward pass ends in, which takes the LSE of the whole result as its own."""
        function = getattr(getattr(self.library, "interface", None), "_flash_attn_bwd", None)
        generation = (compute_capability(self.architecture(query.device)) or 0) // 10
        if function is None or generation == 8 or (deterministic and generation == 12):
            return None
        left, right = edges(causal, window_size)
        dims = query.shape[-1], value.shape[-1]
        if dims != LATENT:
            query, key, value = padded_head_dims(query, key, value, BACKWARD_MULTIPLE, alike=True)
        output, grad_output = (to_head_dim(tensor, value.shape[-1]) for tensor in (output, grad_output))
        rows = [aligned(tensor, self.head_dim_multiple) for tensor in (query, key, value, output, grad_output)]
        cu_seqlens, cu_seqlens_k = sequences.offsets(query.device)
        found = function(
            *rows,
            lse.contiguous(),
            softmax_scale=scale,
            causal=left < 0 and right == 0,
            window_size_left=left if left >= 0 else None,
            window_size_right=right if right > 0 or (right == 0 and left >= 0) else None,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=sequences.max_seqlen,
            max_seqlen_k=sequences.max_seqlen_k,
            deterministic=deterministic,
        )
        return found[0][..., : dims[0]], found[1][..., : dims[0]], found[2][..., : dims[1]]

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if (query.shape[-1], value.shape[-1]) == LATENT:
            return query, key, value
        multiple = BACKWARD_MULTIPLE if wants_gradient(query, key, value) else self.head_dim_multiple
        return padded_head_dims(query, key, value, multiple, alike=True)


def _generation_rules(request: AttentionRequest, generation: int) -> tuple[Refusal, ...]:
    refusals = []
    device = f"sm{generation}x"
    dim = max(request.head_dim, request.value_head_dim)
    full = dim > 248 and generation in (10, 11)
    latent = (request.head_dim, request.value_head_dim) == LATENT and generation in (9, 10, 11)
    if not latent and not full and dim > (256 if generation == 9 else 128):
        more = ", or 249 to 256, or 192 over 128" if generation in (10, 11) else ""
        refusals.append(Refusal("head_dim", f"{dim} on {device}", f"at most 128{more}"))
    if request.sinks and generation not in (9, 10, 11):
        refusals.append(Refusal("sinks", f"given on {device}", "no sinks there", "sm9x, sm10x and sm11x have them"))
    if request.wants_gradient and generation == 8:
        refusals.append(Refusal("gradients", f"wanted on {device}", "inference there", "sm9x and later have them"))
    if request.wants_gradient and request.deterministic and generation == 12:
        refusals.append(Refusal("deterministic", f"given with gradients on {device}", "inference there"))
    if request.wants_gradient and full:
        given = {"softcap": request.softcap > 0, "sinks": request.sinks, "return_lse": request.return_lse}
        need = f"off, with gradients of head dim 256 on {device}"
        refusals += [Refusal(name, "given", need) for name, used in given.items() if used]
    return tuple(refusals)


def import_flash_attn_4() -> ModuleType:
    """Its package; without its compiler, the CuTe DSL, that fails, and the failure is the reason."""
    return import_module("flash_attn.cute")
