"""The numbers of one sequence: scores, softmax with its maximum and sum, and the gradients from these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequence:
    """One sequence or batch entry, heads first: query `[N, Sq, D]`, key `[N, Sk, D]`, value `[N, Sk, Dv]`, float32, the
    key heads repeated; `hidden` bool and `added` broadcast to `[N, Sq, Sk]`; `keep` is the dropout's factor.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    hidden: Tensor | None = None
    added: Tensor | None = None
    sink: Tensor | None = None
    keep: Tensor | None = None

    @property
    def scores(self) -> Tensor:
        """`[N, Sq, Sk]`, -inf where hidden."""
        scores = self.query @ self.key.transpose(-1, -2) * self.scale
        if self.added is not None:
            scores = scores + self.added
        return scores if self.hidden is None else scores.masked_fill(self.hidden, -torch.inf)


@dataclass(frozen=True)
class Softmax:
    """Output `[N, Sq, Dv]`, maximum and sum `[N, Sq]`, and `empty`, the rows in which every key is hidden."""

    output: Tensor
    maximum: Tensor
    total: Tensor
    empty: Tensor


def softmax(sequence: Sequence, empty_lse: float, valid: bool) -> Softmax:
    """Rows without keys: output 0 and `empty_lse` where `valid`; else what a kernel without that correction makes of
    them, the mean of the values, as every score is equally low."""
    scores = sequence.scores
    empty = torch.isneginf(scores).all(-1)
    if not valid:
        scores = scores.masked_fill(empty.unsqueeze(-1), -10000.0)
    maximum = scores.amax(-1)
    if sequence.sink is not None:
        maximum = torch.maximum(maximum, sequence.sink[:, None])
    maximum = maximum.masked_fill(torch.isneginf(maximum), 0.0)
    weights = torch.exp(scores - maximum.unsqueeze(-1))
    total = weights.sum(-1)
    if sequence.sink is not None:
        total = total + torch.exp(sequence.sink[:, None] - maximum)
    weights = weights / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    if sequence.keep is not None:
        weights = weights * sequence.keep
    if valid:
        maximum, total = maximum.masked_fill(empty, empty_lse), total.masked_fill(empty, 1.0)
    return Softmax(weights @ sequence.value, maximum, total, empty)


@dataclass(frozen=True)
class Gradients:
    """Of query, key and value, heads first and before the repeated key heads are added up; of the sink `[N]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None


def gradients(sequence: Sequence, dy: Tensor, output: Tensor, maximum: Tensor, total: Tensor) -> Gradients:
    """From the gradient of the output and what the forward pass left: output, maximum and sum."""
    scores = sequence.scores
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    weights = (torch.exp(scores - maximum.unsqueeze(-1)) / total.unsqueeze(-1)).masked_fill(empty, 0.0)
    kept = weights if sequence.keep is None else weights * sequence.keep
    of_weights = dy @ sequence.value.transpose(-1, -2)
    if sequence.keep is not None:
        of_weights = of_weights * sequence.keep
    row = (dy * output).sum(-1)
    of_scores = weights * (of_weights - row.unsqueeze(-1))
    sink = None
    if sequence.sink is not None:
        share = torch.exp(sequence.sink[:, None] - maximum) / total
        sink = -(share * row).masked_fill(empty.squeeze(-1), 0.0).sum(-1)
    return Gradients(
        of_scores @ sequence.key * sequence.scale,
        of_scores.transpose(-1, -2) @ sequence.query * sequence.scale,
        kept.transpose(-1, -2) @ dy,
        sink,
    )
