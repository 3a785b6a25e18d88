"""`ascend_pfa`: the attention operators of Atlas inference cards (310P), which know neither triangles nor packing."""

from __future__ import annotations

import torch
from torch import Tensor

from hal_attn.capabilities import Capabilities
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn_ascend.generations import Generation, generation_of
from hal_attn_ascend.operators import LONGEST_ROW, UNLIMITED, hidden_pairs, multiple_of_16

MAX_HEADS = 256
MAX_BATCH = 128
MAX_LENGTH = 65535
TILE_ROWS = 2048


class AscendPromptBackend(BatchedKernel):
    """`npu_prompt_flash_attention`, and `npu_incre_flash_attention` for one query, as a 310P has them.

    Their rules there (from their documentation): float16; D a multiple of 16, at most 512; batch at most 128, lengths
    at most 65535; as many key heads as query heads; `sparse_mode` 0, so that a triangle is a full mask: it is given for
    2048 queries at a time, with the keys that these may see, and memory follows the inputs. `next_tokens` is 0 unless
    given, which would cut a mask at the diagonal. No LSE, no gradients, no float mask, nothing packed.
    """

    name = "ascend_pfa"
    distribution = "torch-npu"
    install = "pip install 'hal-attn[ascend]'"
    head_dim_multiple = 16
    native_grouped_heads = False
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16}),
        max_head_dim=512,
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        masks=frozenset({"bool"}),
        key_padding_mask=True,
    )

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        refusals = super().refusals(request)
        architecture = self.architecture(request.device)
        if generation_of(architecture) is not Generation.INFERENCE_310P:
            refusals += (Refusal("device", architecture, Generation.INFERENCE_310P.value),)
        if request.mask_shape is not None and request.mask_shape[1] > 1:
            refusals += (Refusal("mask", "one mask for each head", "one mask for all heads"),)
        dim = multiple_of_16(request.head_dim, request.value_head_dim)
        # A longest length that the caller overstated is still no longer than all rows.
        queries = min(request.seqlen_q or 0, request.tokens_q)
        keys = min(request.seqlen_k or 0, request.tokens_k)
        numbers = (
            ("heads", request.heads, MAX_HEADS),
            ("batch", request.batch, MAX_BATCH),
            ("length", max(queries, keys), MAX_LENGTH),
            ("heads * head_dim", request.heads * dim, LONGEST_ROW - 1),
        )
        return refusals + tuple(
            Refusal(name, str(have), f"at most {most}") for name, have, most in numbers if have > most
        )

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        if call.masks is not None:
            assert call.masks.visible is not None
            assert call.masks.blind is not None
            full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
            hidden = hidden_pairs(call.masks.visible, call.masks.blind, full)
            return self._prompt(query, key, value, call, hidden), None
        if query.shape[1] == 1:
            return self._one_query(query, key, value, call), None
        if call.left < 0 and call.right < 0:
            return self._prompt(query, key, value, call, None), None
        starts = range(0, query.shape[1], TILE_ROWS)
        return torch.cat([self._rows(query, key, value, call, start) for start in starts], 1), None

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall, start: int) -> Tensor:
        """The output of at most `TILE_ROWS` queries from `start`, over the keys that the band leaves any of them."""
        rows = query[:, start : start + TILE_ROWS]
        end = start + rows.shape[1]
        shift = key.shape[1] - query.shape[1]
        first = 0 if call.left < 0 else max(0, start + shift - call.left)
        last = key.shape[1] if call.right < 0 else min(key.shape[1], end + shift + call.right)
        if last <= first:
            return rows.new_zeros(*rows.shape[:-1], value.shape[-1])
        visible = torch.ones(rows.shape[1], last - first, dtype=torch.bool, device=query.device)
        offset = start + shift - first
        if call.right >= 0:
            visible = visible.tril(offset + call.right)
        if call.left >= 0:
            visible = visible.triu(offset - call.left)
        visible = visible[None, None]
        full = (1, 1, *visible.shape[2:])
        hidden = hidden_pairs(visible, ~visible.any(-1), full)
        return self._prompt(rows, key[:, first:last], value[:, first:last], call, hidden)

    def _prompt(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall, hidden: Tensor | None) -> Tensor:
        output: Tensor = self.library.npu_prompt_flash_attention(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            num_heads=query.shape[2],
            scale_value=call.scale,
            input_layout="BSND",
            atten_mask=hidden,
            next_tokens=UNLIMITED,
        )
        return output

    def _one_query(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> Tensor:
        """A single query, whose band is the last keys."""
        first = 0 if call.left < 0 else max(0, key.shape[1] - 1 - call.left)
        output: Tensor = self.library.npu_incre_flash_attention(
            query.contiguous(),
            key[:, first:].contiguous(),
            value[:, first:].contiguous(),
            num_heads=query.shape[2],
            scale_value=call.scale,
            input_layout="BSND",
            inner_precise=0,
        )
        return output
