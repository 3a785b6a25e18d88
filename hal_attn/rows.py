"""The queries that see no key because of where they stand: decided from lengths, never from a vendor's LSE.

```
Sq = 5, Sk = 3, causal        keys
                            0 1 2
              queries  0    . . .   blind
                       1    . . .   blind
                       2    x . .
                       3    x x .
                       4    x x x
```
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hal_attn.packing import PackedSequences
from hal_attn.transfer import to_device


def leading_blind_rows(seqlen_q: int, seqlen_k: int, right: int) -> int:
    """How many queries at the start of a sequence see no key; `right` is the band's right edge, -1 unlimited.

    The left edge never blinds: the band of query `i` begins at or before key `Sk - 1`.
    """
    if seqlen_k == 0:
        return seqlen_q
    return 0 if right < 0 else min(seqlen_q, max(0, seqlen_q - seqlen_k - right))


def packed_blind_rows(sequences: PackedSequences, right: int, tokens_q: int, device: torch.device) -> Tensor | None:
    """Bool `[Tq]`, true for the blind rows of a packed batch; None where the host knows that there are none.

    Where only the device knows the offsets, it finds them there and nothing waits.
    """
    if sequences.cu_seqlens_host is None:
        return _on_device(sequences, right, tokens_q, device)
    pairs = zip(sequences.lengths, sequences.lengths_k, strict=True)
    counts = [leading_blind_rows(queries, keys, right) for queries, keys in pairs]
    if not any(counts):
        return None
    flags = torch.zeros(sequences.cu_seqlens_host[-1], dtype=torch.bool)
    for start, count in zip(itertools.accumulate(sequences.lengths, initial=0), counts, strict=False):
        flags[start : start + count] = True
    return to_device(flags, device)


def _on_device(sequences: PackedSequences, right: int, tokens_q: int, device: torch.device) -> Tensor:
    offsets, offsets_k = sequences.offsets(device)
    rows = torch.arange(tokens_q, device=device, dtype=offsets.dtype)
    sequence = torch.bucketize(rows, offsets[1:], right=True).clamp(max=sequences.count - 1)
    keys = offsets_k.diff()[sequence]
    if right < 0:
        return keys == 0
    place = rows - offsets[:-1][sequence] + keys - offsets.diff()[sequence]
    return (place + right < 0) | (keys == 0)
