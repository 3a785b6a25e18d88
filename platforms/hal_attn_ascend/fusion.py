"""The training operator, `npu_fusion_attention`: every dtype, masks, dropout and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal_attn.kernels import KernelCall, KernelResult
from hal_attn.masks import MaskedInputs
from hal_attn.refusal import Refusal
from hal_attn.rows import leading_blind_rows
from hal_attn_ascend.metadata import AscendMetadata
from hal_attn_ascend.operators import UNLIMITED, hidden_pairs, takes_argument, to_head_dim
from hal_attn_ascend.problem import Problem

MAX_HEADS = 256
MAX_LENGTH = 2**20
MAX_BATCH = 2 * 2**20
MAX_SEQUENCES = 1024


class FusionOperator:
    """`npu_fusion_attention` of torch_npu 7.0 to 26.0 (rules from its documentation and its meta functions).

    Its rules: `scale` is 1 unless given; a mask hides where True; without a mask, `sparse_mode` and the band count for
    nothing; modes 3 (bottom-right triangle) and 4 (bottom-right band) want one compressed 2048 x 2048 triangle; packed
    offsets are host integers without the leading 0; Dv at most D. It returns maximum and sum of the softmax, each
    number eight times; packed, the rows of each sequence lie heads first, unless `softmax_layout` (7.2) says otherwise.
    What it writes for rows without keys is nowhere said. Sinks came with 7.3.
    """

    def __init__(self, library: Any) -> None:
        self.function = library.npu_fusion_attention
        self.softmax_layout = takes_argument(library, "npu_fusion_attention", "softmax_layout")
        self.sink = takes_argument(library, "npu_fusion_attention", "sink")

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        """Its limits that `problem` exceeds."""
        longest = max(problem.longest_q, problem.longest_k, problem.tokens if problem.packed else 0)
        numbers = (
            ("heads", problem.heads, MAX_HEADS),
            ("length", longest, MAX_LENGTH),
            ("batch", problem.sequences, MAX_SEQUENCES if problem.packed else MAX_BATCH),
        )
        return tuple(Refusal(name, str(have), f"at most {most}") for name, have, most in numbers if have > most)

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall, triangle: Tensor | None) -> KernelResult:
        """`triangle` for a band, None without one."""
        metadata = call.metadata
        dim = max(query.shape[-1], value.shape[-1])
        options = {"scale": call.scale, "keep_prob": 1.0 - call.dropout_p, **_band(query, key, call, triangle)}
        if call.masks is not None:
            options |= _masks(call.masks, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))
        if isinstance(metadata, AscendMetadata):
            options |= {"actual_seq_qlen": list(metadata.ends_q), "actual_seq_kvlen": list(metadata.ends_k)}
            if self.softmax_layout:
                options["softmax_layout"] = "TND"
        # Beside the LSE, sinks do not go into the operator: nothing says whether its sum then has them.
        inside = call.sinks is not None and self.sink and not call.needs_lse
        if call.sinks is not None and inside:
            options["sink"] = call.sinks.float().contiguous()
        output, softmax_max, softmax_sum, *_ = self.function(
            to_head_dim(query, dim),
            to_head_dim(key, dim),
            value.contiguous(),
            query.shape[-2],
            "BSND" if metadata is None else "TND",
            **options,
        )
        joins = call.sinks is not None and not inside
        if not call.needs_lse and not joins:
            return output, None
        maximum, total = softmax_max[..., 0], softmax_sum[..., 0]
        if isinstance(metadata, AscendMetadata):
            maximum, total = (self._packed_rows(numbers, metadata) for numbers in (maximum, total))
        if call.sinks is not None and joins:
            output, maximum, total = _joined(output, maximum, total, call.sinks)
        return output, maximum + torch.log(total) if call.needs_lse else None

    def _packed_rows(self, numbers: Tensor, metadata: AscendMetadata) -> Tensor:
        """`[T, H]` as the operator leaves it -> `[H, T]`; without `softmax_layout` its memory holds `[H, S_i]` for each
        sequence, one after another."""
        if self.softmax_layout:
            return numbers.transpose(0, 1)
        heads = numbers.shape[1]
        lengths = [end - start for start, end in zip((0, *metadata.ends_q), metadata.ends_q, strict=False)]
        blocks = numbers.reshape(-1).split([heads * length for length in lengths])
        return torch.cat([block.view(heads, length) for block, length in zip(blocks, lengths, strict=True)], 1)


def _band(query: Tensor, key: Tensor, call: KernelCall, triangle: Tensor | None) -> dict[str, object]:
    if call.masks is not None or triangle is None:
        return {}
    if call.metadata is None:
        blind = leading_blind_rows(query.shape[1], key.shape[1], call.right) > 0
    else:
        blind = call.metadata.blind is not None
    # 2 makes rows without keys valid; the operator does so by itself only for some of them, and it costs time.
    options: dict[str, object] = {"atten_mask": triangle, "inner_precise": 2 if blind else 0}
    if call.causal:
        return {**options, "sparse_mode": 3}
    left, right = (UNLIMITED if edge < 0 else edge for edge in (call.left, call.right))
    return {**options, "sparse_mode": 4, "pre_tockens": left, "next_tockens": right}


def _masks(masks: MaskedInputs, full: tuple[int, int, int, int]) -> dict[str, object]:
    """The masks and the band in one full mask (mode 1), and what a float mask adds as `pse`."""
    assert masks.visible is not None
    assert masks.blind is not None
    options: dict[str, object] = {"atten_mask": hidden_pairs(masks.visible, masks.blind, full), "sparse_mode": 1}
    if masks.additive:
        assert masks.added is not None
        pse = masks.added.masked_fill(torch.isneginf(masks.added), 0.0)
        # [B, H, 1, Sk], [1, H, Sq, Sk] and [B, H, Sq, Sk] are the shapes that it takes.
        shape = (full[0], full[1], 1, full[3]) if pse.shape[2] == 1 else (pse.shape[0], *full[1:])
        options["pse"] = pse.expand(shape).contiguous()
    return options


def _joined(output: Tensor, maximum: Tensor, total: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[..., S, H, Dv]`, maximum and sum `[..., H, S]` with one more logit a head in the denominator.

    From maximum and sum, where a join by the LSE would lose its last digits in float32.
    """
    sink = sinks.float()[:, None]
    highest = torch.maximum(maximum, sink)
    own = total * torch.exp(maximum - highest)
    joined = own + torch.exp(sink - highest)
    share = (own / joined).transpose(-1, -2).unsqueeze(-1)
    return (output * share).to(output.dtype), highest, joined
