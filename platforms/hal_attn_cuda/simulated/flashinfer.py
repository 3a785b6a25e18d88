"""FlashInfer's cuDNN prefill on the CPU, under the signature, conventions and limits of flashinfer-python 0.7.4."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hal_attn.portable.operators import wants_gradient
from hal_attn.simulation.aten import ALIGNMENT, must
from hal_attn.simulation.attention import Attended, Band, attend


def simulated_flashinfer(empty_lse: float | None = None) -> SimulatedFlashInfer:
    """`flashinfer.cudnn.prefill`; a row without keys gives NaN, and LSE NaN or `empty_lse`."""
    return SimulatedFlashInfer(math.nan if empty_lse is None else empty_lse)


@dataclass(frozen=True)
class SimulatedFlashInfer:
    """The module, with cuDNN's Python package beside it."""

    empty_lse: float
    CUDNN_AVAILABLE: bool = True

    def cudnn_batch_prefill_with_kv_cache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        workspace_buffer: Tensor,
        *,
        max_token_per_sequence: int,
        max_sequence_kv: int,
        actual_seq_lens_q: Tensor | None = None,
        actual_seq_lens_kv: Tensor | None = None,
        block_tables: Tensor | None = None,
        causal: bool,
        return_lse: bool,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        batch_offsets_q: Tensor | None = None,
        batch_offsets_o: Tensor | None = None,
        batch_offsets_k: Tensor | None = None,
        batch_offsets_v: Tensor | None = None,
        batch_offsets_stats: Tensor | None = None,
        batch_offsets_units: str = "elements",
        out: Tensor | None = None,
        lse: Tensor | None = None,
        is_cuda_graph_compatible: bool = False,
        backend: str | None = None,
        o_data_type: torch.dtype | None = None,
        lse_base: str = "log2",
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        must(block_tables is None and sinks is None, "the simulation has no pages and no sinks")
        must(batch_offsets_units == "elements", "the simulation counts in elements")
        _check(q, k_cache, v_cache)
        must(workspace_buffer.numel() >= 128 * 1024 * 1024, "the workspace is too small")
        heads, value_dim = q.shape[1], v_cache.shape[2]
        lengths, lengths_k = _lengths(actual_seq_lens_q), _lengths(actual_seq_lens_kv)
        must(max(lengths) <= max_token_per_sequence, "max_token_per_sequence is shorter than a sequence")
        must(max(lengths_k) <= max_sequence_kv, "max_sequence_kv is shorter than a sequence")
        count = len(lengths)
        starts = _rows(batch_offsets_q, q.stride(0), count)
        places = _rows(batch_offsets_o, heads * value_dim, count)
        starts_k, starts_v = (
            _rows(batch_offsets_k, k_cache.stride(0), count),
            _rows(batch_offsets_v, v_cache.stride(0), count),
        )
        # What no sequence covers is never written.
        output = q.new_full((q.shape[0], heads, value_dim), math.nan)
        statistics = torch.full((q.shape[0], heads), math.nan)
        band = Band(window_left, 0 if causal else None)
        for n in range(count):
            if not lengths[n] or not lengths_k[n]:
                continue
            rows = slice(starts[n], starts[n] + lengths[n])
            keys = slice(starts_k[n], starts_k[n] + lengths_k[n])
            values = slice(starts_v[n], starts_v[n] + lengths_k[n])
            visible = band.visible(lengths[n], lengths_k[n])
            one = attend(q[rows][None], k_cache[keys][None], v_cache[values][None], scale=scale, visible=visible)
            places_n = slice(places[n], places[n] + lengths[n])
            output[places_n], statistics[places_n] = self._written(one)
        if not return_lse:
            return output, None
        must(lse_base in ("ln", "log2"), "lse_base must be 'log2' or 'ln'")
        return output, statistics if lse_base == "ln" else statistics / math.log(2)

    def _written(self, attended: Attended) -> tuple[Tensor, Tensor]:
        blind = attended.empty[0].transpose(0, 1).unsqueeze(-1)
        return torch.where(blind, math.nan, attended.output[0]), attended.lse_with(self.empty_lse)[0].transpose(0, 1)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    must(q.dtype in (torch.float16, torch.bfloat16), "the dtype must be fp16 or bf16")
    must(q.dtype == k.dtype == v.dtype, "query, key and value must have one dtype")
    must(q.dim() == k.dim() == v.dim() == 3, "packed tensors have 3 dimensions")
    must(
        q.shape[2] <= 128 and q.shape[2] % ALIGNMENT == 0 and v.shape[2] <= 128, "No execution plans support the graph"
    )
    must(q.shape[1] % k.shape[1] == 0, "query heads must be a multiple of key heads")
    must(not wants_gradient(q, k, v), "there is no backward pass")


def _lengths(lengths: Tensor | None) -> list[int]:
    must(lengths is not None, "actual_seq_lens are required with element offsets")
    assert lengths is not None
    must(lengths.dtype == torch.int32 and lengths.shape[1:] == (1, 1, 1), "lengths are int32 (B, 1, 1, 1)")
    values: list[int] = lengths.flatten().tolist()
    return values


def _rows(offsets: Tensor | None, row: int, count: int) -> list[int]:
    must(offsets is not None, "batch_offsets are required when batch_size > 1")
    assert offsets is not None
    must(offsets.dtype == torch.int32 and offsets.shape == (count + 1,), "offsets are int32 (B + 1,)")
    values = offsets.tolist()
    must(all(value % row == 0 for value in values), "an offset is not the start of a row")
    return [value // row for value in values]
