"""Joining partial results in place by one Triton kernel: what plain PyTorch does in ten passes over them.

On an H200, joining 32,768 rows of 24 heads of 128 in bfloat16 took plain PyTorch 1.1 ms.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hal_attn.sequence_parallel.current import current
from hal_attn.sequence_parallel.work import RowSet

_ROWS = 32
_MAX_HEAD_DIM = 1024


def takes(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> bool:
    """Whether `join` can: on an NVIDIA GPU, with Triton, for rows that lie densely. It never ran on AMD's."""
    return (
        output.device.type == "cuda"
        and torch.version.hip is None
        and _has_triton()
        and output.shape[-1] <= _MAX_HEAD_DIM
        and output.is_contiguous()
        and lse.stride(1) == 1
        and part_lse.stride(1) == 1
        and part.stride(-1) == 1
    )


def join(output: Tensor, lse: Tensor, rows: RowSet, part: Tensor, part_lse: Tensor) -> None:
    """Joins the states `part` `[T', H, Dv]` and `part_lse` `[H, T']` to the rows `rows` of `output` `[T, H, Dv]` and
    `lse` `[H, T]`, in place: computed in float32, and rounded to the dtype of `output`."""
    count, heads, dim = part.shape
    if not (count and heads and dim):
        return
    index = rows.on(output.device) if rows.index is not None else part_lse
    grid = ((count + _ROWS - 1) // _ROWS, heads)
    with current(output.device):
        _kernel()[grid](
            output,
            lse,
            part,
            part_lse,
            index,
            rows.start or 0,
            count,
            output.stride(0),
            output.stride(1),
            lse.stride(0),
            part.stride(0),
            part.stride(1),
            part_lse.stride(0),
            indexed=rows.index is not None,
            dim=dim,
            wide=1 << (dim - 1).bit_length(),
            block=_ROWS,
        )


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _kernel() -> Any:
    from hal_attn.sequence_parallel.triton_join import join_states

    return join_states
