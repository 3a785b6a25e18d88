"""`torch_efficient`: PyTorch's memory-efficient attention (CUTLASS): float32, masks, and any head dim."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hal_attn.capabilities import Capabilities
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult, PackedKernel
from hal_attn.portable.bias import joined_bias
from hal_attn.portable.generation import compute_capability, grid_rule, repeatable_backward_rule
from hal_attn.portable.lse import packed_lse
from hal_attn.portable.operators import aligned, operator_parameters, wants_gradient
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

OPERATOR = "_efficient_attention_forward"
FROM_BOTTOM_RIGHT = 2


class TorchEfficientBackend(BatchedKernel, PackedKernel):
    """aten `_efficient_attention_forward`, `[B, S, H, D]`, packed `[1, T, H, D]`, as of PyTorch 2.13 (rules read from
    its sources and the headers that it installs).

    Its rules: float32, float16, and bfloat16 from compute capability 8.0; as many key heads as query heads; any head
    dims, value's own, padded to a multiple of 8 and aligned to 16 bytes, as are all strides; one additive mask in the
    dtype of query, of the full shape, rows padded to a multiple of 16, not with packed sequences. `custom_mask_type` 2
    hangs the triangle from the bottom right, and is only right with at least as many keys as queries: its diagonal is
    unsigned. `window_size` counts the diagonal, `left + 1`, needs a triangle, and is forgotten by the backward pass, so
    that a window with gradients is refused. The LSE must be asked for, for the backward pass too; it is padded to a
    multiple of 32 rows, packed `[N, H, longest]`; a row without keys gives 0.0, or NaN before 2.5. The backward pass
    may add in any order.

    From compute capability 8.0 a float32 product is three in TF32 (CUTLASS's `OpMultiplyAddFastF32`), which drop the
    last bits. On an H200 (PyTorch 2.11) errors were at most 2.9 times what the precision rule allows beside plain
    PyTorch there, in the LSE of a single key; its output, the value itself, was two units in the last place off.
    """

    name = "torch_efficient"
    head_dim_multiple = 8
    one_head_dim = False
    native_grouped_heads = False
    tolerances = MappingProxyType({torch.float32: 3.0})
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        masks=frozenset({"bool", "float"}),
        mask_dtype_of_query=True,
        key_padding_mask=True,
        sinks=True,
        dropout=True,
        deterministic=True,
        lse=True,
        gradients=True,
        option_gradients=frozenset({"mask"}),
    )

    def unavailable(self) -> Refusal | None:
        if hasattr(self.library, OPERATOR):
            return None
        return Refusal("installed", f"PyTorch {torch.__version__}", f"PyTorch with aten {OPERATOR}, 2.2 or later")

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        refusals = super().refusals(request)
        capability = compute_capability(self.architecture(request.device))
        if request.dtype == torch.bfloat16 and capability is not None and capability < 80:
            refusals += (Refusal("dtype", f"bfloat16 on sm{capability}", "sm80 or later, or float16"),)
        refusals += repeatable_backward_rule(request) + grid_rule(request)
        masked = request.mask != "none" or request.key_padding_mask
        return refusals if masked else refusals + self._band_rules(request)

    def _band_rules(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        """What the kernel's own triangle and window cannot do; a mask takes the band in instead."""
        refusals: tuple[Refusal, ...] = ()
        if request.window_size is not None:
            if not request.causal:
                refusals += (Refusal("window_size", str(request.window_size), "a window that ends at the diagonal"),)
            if request.wants_gradient:
                need = "inference, its backward forgets the window"
                refusals += (Refusal("window_size", f"{request.window_size} with gradients", need),)
            if "window_size" not in operator_parameters(getattr(self.library, OPERATOR, None)):
                refusals += (Refusal("window_size", f"PyTorch {torch.__version__}", "PyTorch whose operator has it"),)
        unequal = request.packed or (request.seqlen_q or 0) > (request.seqlen_k or 0)
        if request.causal and not request.equal_lengths and unequal:
            have = "packed key and query lengths that differ" if request.packed else "more queries than keys"
            refusals += (Refusal("causal", have, "at least as many keys as queries, its diagonal is unsigned"),)
        return refusals

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        bias = None if call.masks is None else joined_bias(call.masks, query.shape[1], key.shape[1])
        if bias is not None:
            bias = bias.expand(query.shape[0], query.shape[2], -1, -1)
        mask_type = FROM_BOTTOM_RIGHT if bias is None and call.right == 0 else 0
        options: dict[str, Any] = {"scale": call.scale}
        if bias is None and call.left >= 0:
            options["window_size"] = call.left + 1
        batch = [aligned(tensor, self.head_dim_multiple) for tensor in (query, key, value)]
        offsets: tuple[Tensor | None, ...] = (None, None)
        lengths: tuple[int | None, ...] = (None, None)
        if call.metadata is not None:
            sequences = call.metadata.sequences
            batch = [tensor.unsqueeze(0) for tensor in batch]
            offsets = sequences.offsets(query.device)
            # The backward pass refuses a longest sequence that is longer than all rows.
            lengths = (min(sequences.max_seqlen, query.shape[0]), min(sequences.max_seqlen_k, key.shape[0]))
        with_lse = call.needs_lse or wants_gradient(query, key, value, bias)
        operator: Callable[..., tuple[Tensor, ...]] = getattr(self.library, OPERATOR)
        output, lse, *_ = operator(*batch, bias, *offsets, *lengths, call.dropout_p, mask_type, with_lse, **options)
        if call.metadata is None:
            return output, lse[..., : query.shape[1]] if call.needs_lse else None
        packed = packed_lse(lse, call.metadata.sequences, query.shape[0]) if call.needs_lse else None
        return output.squeeze(0), packed
