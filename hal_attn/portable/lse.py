"""The LSE of packed calls from kernels that keep one padded row of it a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from hal_attn.packing import PackedSequences


def packed_lse(lse: Tensor, sequences: PackedSequences, tokens_q: int) -> Tensor:
    """`[N, H, at least the longest]`, each sequence's rows first -> `[H, Tq]`. Never waits for the device."""

    def places() -> tuple[Tensor, Tensor]:
        offsets, _ = sequences.offsets(lse.device)
        rows = torch.arange(tokens_q, device=lse.device)
        sequence = torch.bucketize(rows, offsets[1:], right=True).clamp(max=sequences.count - 1)
        return sequence, rows - offsets[sequence]

    sequence, row = sequences.memo(("rows", lse.device, tokens_q), places)
    return lse[sequence, :, row].transpose(0, 1)
