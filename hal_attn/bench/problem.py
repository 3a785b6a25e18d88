"""One problem: sequences, heads, dtype and band; its tensors, and its exact answer at some rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, cycle, takewhile
from typing import Any

import torch
from torch import Tensor

from hal_attn.packing import PackedSequences
from hal_attn.sequence_parallel.work import visible_pairs

_SAMPLED_ROWS = 64
_LONGEST, _SHORTEST = 16384, 32


@dataclass(frozen=True)
class Problem:
    """Self-attention of `lengths` tokens: packed sequences, or a dense batch of one length."""

    lengths: tuple[int, ...]
    packed: bool
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return sum(self.lengths)

    @property
    def operations(self) -> float:
        """Floating point operations of the forward pass: two products over the pairs that are seen."""
        right = 0 if self.causal else -1
        return 4.0 * self.heads * self.head_dim * sum(visible_pairs(n, n, -1, right) for n in self.lengths)

    @property
    def shape(self) -> dict[str, Any]:
        """As `SequenceParallelGroups.plan` takes it."""
        if self.packed:
            return {"lengths": list(self.lengths), "causal": self.causal}
        return {"batch": len(self.lengths), "seqlen": self.lengths[0], "causal": self.causal}

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    def describe(self) -> str:
        """In a line, for a heading."""
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        kind = "causal" if self.causal else "full"
        if self.packed:
            some = ",".join(map(str, self.lengths[:3]))
            more = ",.." if len(self.lengths) > 3 else ""
            form = f"packed {some}{more} ({len(self.lengths)} sequences, {self.tokens} tokens)"
        else:
            form = f"dense {self.lengths[0]} tokens"
            form = form if len(self.lengths) == 1 else f"batch {len(self.lengths)} of {self.lengths[0]} tokens"
        return f"{form}, {heads} heads of {self.head_dim}, {str(self.dtype).removeprefix('torch.')}, {kind}"

    def smaller(self, tokens: int) -> Problem:
        """The same with its longest sequences cut to `tokens`, and no more of them than make twice as many."""
        cut = [min(length, tokens) for length in self.lengths]
        return replace(
            self, lengths=tuple(n for n, so_far in zip(cut, accumulate(cut), strict=True) if so_far <= 2 * tokens)
        )

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and a gradient of the output, `[B, S, H, D]` or packed `[T, H, D]`, alike on every rank."""
        generator = torch.Generator(device).manual_seed(0)
        rows = (self.tokens,) if self.packed else (len(self.lengths), self.lengths[0])
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        query, key, value, gradient = (
            torch.randn(*rows, number, self.head_dim, generator=generator, device=device, dtype=self.dtype)
            for number in heads
        )
        return query, key, value, gradient

    def sequences(self, device: torch.device) -> PackedSequences:
        """The offsets of a packed problem."""
        return PackedSequences.from_lengths(list(self.lengths), device=device)

    def sampled(self) -> Tensor:
        """The rows that are checked against the exact answer, int64, spread over all tokens."""
        rows = min(self.tokens, _SAMPLED_ROWS)
        return torch.tensor([index * (self.tokens - 1) // max(1, rows - 1) for index in range(rows)])

    def exact(self, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The output at the sampled rows, `[n, H, D]` of `dtype`: plain softmax in it."""
        query, key, value = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value))
        ends = torch.tensor(self.lengths).cumsum(0)
        outputs = []
        for row in self.sampled().tolist():
            sequence = int(torch.searchsorted(ends, row, right=True))
            end = int(ends[sequence])
            keys = slice(end - self.lengths[sequence], row + 1 if self.causal else end)
            group = self.heads // self.kv_heads
            q = query[row].to(dtype).view(self.kv_heads, group, self.head_dim) * self.head_dim**-0.5
            weights = torch.einsum("hgd,khd->hgk", q, key[keys].to(dtype)).softmax(-1)
            outputs.append(torch.einsum("hgk,khd->hgd", weights, value[keys].to(dtype)).flatten(0, 1))
        return torch.stack(outputs)


def problem_from_json(values: Mapping[str, Any]) -> Problem:
    """The problem whose fields a file has."""
    dtype = getattr(torch, values["dtype"])
    return Problem(**{**values, "lengths": tuple(values["lengths"]), "dtype": dtype})


def mixed_lengths(tokens: int) -> tuple[int, ...]:
    """`tokens` in sequences of very different lengths: 16384, 8192, ..., 32 (none over half of them), and again;
    under 64 in one."""
    halves = takewhile(lambda length: length >= _SHORTEST, (_LONGEST >> step for step in count()))
    lengths: list[int] = []
    for length in cycle([length for length in halves if length <= tokens // 2] or [tokens]):
        lengths.append(min(length, tokens - sum(lengths)))
        if sum(lengths) == tokens:
            break
    return tuple(lengths)


def problems(
    tokens: Sequence[int],
    packed: Sequence[tuple[int, ...]],
    causal: Sequence[bool],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> list[Problem]:
    """Every shape, causal or not as asked."""
    shapes = [((length,), False) for length in tokens] + [(lengths, True) for lengths in packed]
    return [
        Problem(lengths, is_packed, heads, kv_heads, head_dim, dtype, band)
        for lengths, is_packed in shapes
        for band in causal
    ]
