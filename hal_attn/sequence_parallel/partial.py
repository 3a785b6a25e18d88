"""Partial results joined as they come: output and LSE in float32, each row by the states that reached it."""

from __future__ import annotations

import torch
from torch import Tensor

from hal_attn.sequence_parallel.work import RowSet


class PartialStates:
    """The states of `rows` queries: output `[T, H, Dv]`, LSE `[H, T]`; a row that nothing reached is 0 and -inf.

    One result for all rows is kept as it is, in its own dtype: only a second one makes float32 of it.
    """

    def __init__(self, rows: int, heads: int, value_head_dim: int, device: torch.device) -> None:
        self.shape = (rows, heads, value_head_dim)
        self.device = device
        self._output: Tensor | None = None
        self._lse: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """`[T, H, Dv]`, float32 once more than one result was joined."""
        return self._begun()[0]

    @property
    def lse(self) -> Tensor:
        """`[H, T]` float32."""
        return self._begun()[1]

    def add(self, rows: RowSet, output: Tensor, lse: Tensor) -> None:
        """Join the states of `rows`: output `[T', H, Dv]`, LSE `[H, T']`."""
        if self._output is None and rows.all:
            self._output, self._lse = output, lse
            return
        own, own_lse = self._begun()
        before, before_lse = rows.take(own).float(), rows.take(own_lse, 1)
        joined = torch.logaddexp(before_lse, lse)
        merged = torch.lerp(before, output.float(), share(lse, joined))
        if rows.all:
            self._output, self._lse = merged, joined
            return
        if own.dtype != torch.float32:
            self._output = own = own.float()
        rows.put(own, merged)
        rows.put(own_lse, joined, 1)

    def replace(self, rows: RowSet, output: Tensor, lse: Tensor) -> None:
        """Set the states of `rows`, whatever they were."""
        own, own_lse = self._begun()
        self._output = own = own.float()
        rows.put(own, output)
        rows.put(own_lse, lse, 1)

    def _begun(self) -> tuple[Tensor, Tensor]:
        if self._output is None or self._lse is None:
            rows, heads, _ = self.shape
            self._output = torch.zeros(self.shape, dtype=torch.float32, device=self.device)
            self._lse = torch.full((heads, rows), -torch.inf, dtype=torch.float32, device=self.device)
        return self._output, self._lse


def share(lse: Tensor, joined: Tensor) -> Tensor:
    """What part of `joined` states of `lse` have, as `[T, H, 1]`; 0 where there is nothing to share."""
    part = torch.exp(lse - joined).masked_fill(torch.isneginf(lse), 0.0)
    return part.transpose(0, 1).unsqueeze(-1)
