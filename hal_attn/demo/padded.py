"""The model as its authors run it: BERT of `transformers` with its own attention, over padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hal_attn.demo.model import require_module


class PaddedModel:
    """The same weights, padding and attention of `transformers` (PyTorch's SDPA with a mask), nothing of `hal_attn`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        transformers = require_module("transformers")
        # Its progress bar would break ours.
        require_module("transformers.utils.logging").disable_progress_bar()
        bert = transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa", local_files_only=True)
        self._bert: Any = bert.to(device).eval()
        self._device = device

    def __call__(self, sentences: Sequence[Sequence[int]]) -> Tensor:
        """Unit vectors `[N, hidden]` of N sentences of token ids, padded to the longest of them."""
        rows = [torch.tensor(ids) for ids in sentences]
        token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        real = real.to(self._device)
        hidden = self._bert(input_ids=token_ids, attention_mask=real).last_hidden_state
        weights = real.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def padded_tokens(lengths: Sequence[int]) -> int:
    """Tokens that one padded batch of sentences of these lengths computes."""
    return len(lengths) * max(lengths, default=0)
