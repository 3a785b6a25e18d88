"""Partial results joined as they come: output and LSE, each row by the states that reached it; gradients added up."""

from __future__ import annotations

import torch
from torch import Tensor

from hal_attn.sequence_parallel import fused
from hal_attn.sequence_parallel.work import RowSet


class PartialStates:
    """The states of `rows` queries: output `[T, H, Dv]`, LSE `[H, T]`; a row that nothing reached is 0 and -inf.

    Args:
        dtype: of the output while it is joined. float32, unless no row is reached by more than two results: those are
            joined in float32 and rounded once, whichever dtype holds the first.

    One result for all rows is kept as it is, in its own dtype, until a second one is joined.
    """

    def __init__(self, rows: int, heads: int, value_head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = (rows, heads, value_head_dim)
        self.device = device
        self.dtype = dtype
        self._output: Tensor | None = None
        self._lse: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """`[T, H, Dv]`."""
        return self._begun()[0]

    @property
    def lse(self) -> Tensor:
        """`[H, T]` float32."""
        return self._begun()[1]

    def add(self, rows: RowSet, output: Tensor, lse: Tensor) -> None:
        """Join the states of `rows`: output `[T', H, Dv]`, LSE `[H, T']`. Those that were there may change in place."""
        if self._output is None and rows.all:
            self._output, self._lse = output, lse
            return
        own, own_lse = self._begun()
        if own.dtype != self.dtype:
            self._output = own = own.to(self.dtype)
        if fused.takes(own, own_lse, output, lse):
            fused.join(own, own_lse, rows, output, lse)
        else:
            self._join_plainly(own, own_lse, rows, output, lse)

    def _join_plainly(self, own: Tensor, own_lse: Tensor, rows: RowSet, output: Tensor, lse: Tensor) -> None:
        before, before_lse = rows.take(own).float(), rows.take(own_lse, 1)
        joined = torch.logaddexp(before_lse, lse)
        merged = torch.lerp(before, output.float(), share(lse, joined)).to(own.dtype)
        if rows.all:
            self._output, self._lse = merged, joined
            return
        rows.put(own, merged)
        rows.put(own_lse, joined, 1)

    def replace(self, rows: RowSet, output: Tensor, lse: Tensor) -> None:
        """Set the states of `rows`, whatever they were."""
        own, own_lse = self._begun()
        self._output = own = own.to(self.dtype)
        rows.put(own, output)
        rows.put(own_lse, lse, 1)

    def _begun(self) -> tuple[Tensor, Tensor]:
        if self._output is None or self._lse is None:
            rows, heads, _ = self.shape
            self._output = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self._lse = torch.full((heads, rows), -torch.inf, dtype=torch.float32, device=self.device)
        return self._output, self._lse


class GradientSum:
    """The gradient of a tensor `[T, H, d]`, added up from those of its rows; 0 where none comes.

    Args:
        dtype: of the sum. float32, unless no row has more than two parts: those are added in float32 and rounded once,
            whichever dtype holds the first.

    One part for all rows is kept as it is, in its own dtype, until a second one is added; then it changes in place.
    """

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self._like = tensor
        self._dtype = dtype
        self._total: Tensor | None = None

    def add(self, rows: RowSet, part: Tensor) -> None:
        """Add `part` `[T', H, d]` to `rows`."""
        if self._total is None and rows.all:
            self._total = part
            return
        # Only an index can name a row twice.
        dtype = self._dtype if rows.index is None else torch.float32
        self._total = self.total.to(torch.promote_types(self.total.dtype, dtype))
        rows.add(self._total, part)

    @property
    def total(self) -> Tensor:
        """The sum so far."""
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=self._dtype, memory_format=torch.contiguous_format)
        return self._total


def share(lse: Tensor, joined: Tensor) -> Tensor:
    """What part of `joined` states of `lse` have, as `[T, H, 1]`; 0 where there is nothing to share."""
    part = torch.exp(lse - joined).masked_fill(torch.isneginf(lse), 0.0)
    return part.transpose(0, 1).unsqueeze(-1)
