"""The inference operators, `npu_fused_infer_attention_score` and its second version: 16-bit forward passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal_attn.kernels import KernelCall, KernelResult
from hal_attn.rows import leading_blind_rows
from hal_attn_ascend.metadata import AscendMetadata
from hal_attn_ascend.operators import LONGEST_ROW, UNLIMITED, multiple_of_16, to_head_dim
from hal_attn_ascend.problem import Problem

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEADS = 256
MAX_GROUP = 64
MAX_HEAD_DIM = 512
MAX_BATCH = 65536
MAX_LENGTH = 20 * 2**20
MAX_LENGTH_OF_ONE_QUERY = 262144
MAX_SEQUENCES = 4096


class Names(NamedTuple):
    """What a version of the operator calls its arguments, the head dims (D, Dv) and rows that it takes packed."""

    function: str
    heads: str
    scale: str
    lse: str
    ends_q: str
    ends_k: str
    packed_head_dims: frozenset[tuple[int, int]]
    max_tokens: int


V1 = Names(
    "npu_fused_infer_attention_score",
    "num_heads",
    "scale",
    "softmax_lse_flag",
    "actual_seq_lengths",
    "actual_seq_lengths_kv",
    frozenset({(128, 128), (192, 128), (192, 192)}),
    65536,
)
V2 = Names(
    "npu_fused_infer_attention_score_v2",
    "num_query_heads",
    "softmax_scale",
    "return_softmax_lse",
    "actual_seq_qlen",
    "actual_seq_kvlen",
    frozenset({(64, 64), (128, 128), (192, 128), (192, 192)}),
    2**20,
)


class InferenceOperator:
    """`npu_fused_infer_attention_score_v2` (torch_npu 7.2), or without it the first version, on Atlas A2 and A3.

    Its rules (from its documentation): contiguous float16 and bfloat16; `scale` and the number of heads are 1 unless
    given; D a multiple of 16 and the same for keys and values; with one query it ignores `sparse_mode` and the band;
    packed, few head dims, as many keys as queries under a triangle, and host offsets without the leading 0. What it
    writes for rows without keys is nowhere said.

    Left to the training operator although documented here, because of wrong answers reported from some releases:
    masks (vllm-ascend 15503), packed sequences without any band (vllm-ascend 13699).
    """

    def __init__(self, library: Any) -> None:
        self.names = V2 if hasattr(library, V2.function) else V1
        self.function = getattr(library, self.names.function)

    def takes(self, problem: Problem) -> bool:
        """Whether it computes `problem`, within its limits."""
        if problem.dtype not in DTYPES or problem.training or problem.masked:
            return False
        if problem.heads > MAX_HEADS or problem.heads // problem.kv_heads > MAX_GROUP:
            return False
        return self._takes_packed(problem) if problem.packed else self._takes_batched(problem)

    def _takes_batched(self, problem: Problem) -> bool:
        longest = MAX_LENGTH_OF_ONE_QUERY if problem.longest_q == 1 else MAX_LENGTH
        return (
            max(problem.head_dim, problem.value_head_dim) <= MAX_HEAD_DIM
            and max(problem.longest_q, problem.longest_k) <= longest
            and problem.sequences <= MAX_BATCH
        )

    def _takes_packed(self, problem: Problem) -> bool:
        # Single queries lose the band, which is right with single keys only. Those must stay here: a maximum above the
        # true one brought them, when the limits of the training operator were not asked.
        return (
            (problem.left >= 0 or problem.right >= 0)
            and (problem.longest_q > 1 or problem.longest_k == 1)
            and not problem.more_queries
            and (problem.head_dim, problem.value_head_dim) in self.names.packed_head_dims
            and problem.tokens <= self.names.max_tokens
            and problem.sequences <= MAX_SEQUENCES
        )

    def takes_sinks(self, call: KernelCall, value_head_dim: int) -> bool:
        """Only bfloat16 sinks of packed calls, as they would be rounded to it; beside the LSE never, as nothing says
        whether it has them."""
        if call.sinks is None or call.needs_lse or self.names is not V2 or call.metadata is None:
            return False
        return call.sinks.dtype == torch.bfloat16 and value_head_dim <= 128

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall, triangle: Tensor | None) -> KernelResult:
        """`triangle` for a band, None without one."""
        if call.metadata is None:
            return self._batched(query, key, value, call, triangle)
        assert isinstance(call.metadata, AscendMetadata)
        options = self._options(query, key, call, "TND")
        options |= {self.names.ends_q: list(call.metadata.ends_q), self.names.ends_k: list(call.metadata.ends_k)}
        options |= _band(call, triangle)
        if call.sinks is not None:
            options["learnable_sink"] = call.sinks.contiguous()
        output, lse = self.function(query.contiguous(), key.contiguous(), value.contiguous(), **options)
        return output, lse.squeeze(-1).transpose(0, 1) if call.needs_lse else None

    def _batched(
        self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall, triangle: Tensor | None
    ) -> KernelResult:
        if query.shape[1] == 1:
            # The operator ignores the band of a single query, which is the last keys.
            first = 0 if call.left < 0 else max(0, key.shape[1] - 1 - call.left)
            key, value, triangle = key[:, first:], value[:, first:], None
        dim = multiple_of_16(query.shape[-1], value.shape[-1])
        inside = query.shape[2] * dim < LONGEST_ROW
        options = self._options(query, key, call, "BSND" if inside else "BNSD") | _band(call, triangle)
        if triangle is not None and leading_blind_rows(query.shape[1], key.shape[1], call.right):
            options["inner_precise"] = 2
        inputs = (query, key, value) if inside else (tensor.transpose(1, 2) for tensor in (query, key, value))
        output, lse = self.function(*(to_head_dim(tensor, dim) for tensor in inputs), **options)
        return output if inside else output.transpose(1, 2), lse.squeeze(-1) if call.needs_lse else None

    def _options(self, query: Tensor, key: Tensor, call: KernelCall, layout: str) -> dict[str, object]:
        return {
            self.names.heads: query.shape[-2],
            "num_key_value_heads": key.shape[-2],
            self.names.scale: call.scale,
            self.names.lse: call.needs_lse,
            "input_layout": layout,
        }


def _band(call: KernelCall, triangle: Tensor | None) -> dict[str, object]:
    if triangle is None:
        return {}
    if call.causal:
        return {"atten_mask": triangle, "sparse_mode": 3}
    left, right = (UNLIMITED if edge < 0 else edge for edge in (call.left, call.right))
    return {"atten_mask": triangle, "sparse_mode": 4, "pre_tokens": left, "next_tokens": right}
