"""The kernel calls of one hop: the blocks of all sequences, those with the same band as one packed call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hal_attn.packing import PackedSequences
from hal_attn.sequence_parallel.blocks import Block, Runs
from hal_attn.transfer import to_device


@dataclass(frozen=True)
class RowSet:
    """Rows of a tensor: all of them (`index` and `start` None), a slice (`start`, `count`), or an index per device."""

    count: int
    start: int | None = None
    index: Tensor | None = None
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]], total: int) -> RowSet:
        """The rows of `runs` out of `total`, in their order; a view wherever they follow one another."""
        joined: list[tuple[int, int]] = []
        for row, count in runs:
            if joined and sum(joined[-1]) == row:
                joined[-1] = (joined[-1][0], joined[-1][1] + count)
            else:
                joined.append((row, count))
        if joined == [(0, total)]:
            return cls(total)
        if len(joined) == 1:
            return cls(joined[0][1], joined[0][0])
        parts = [torch.arange(row, row + count) for row, count in joined]
        index = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
        return cls(index.numel(), None, index)

    @classmethod
    def of_index(cls, index: Tensor, total: int) -> RowSet:
        """The rows of an int64 index on the CPU, out of `total`."""
        count = index.numel()
        first = int(index[0]) if count else 0
        if not torch.equal(index, torch.arange(first, first + count)):
            return cls(count, None, index)
        return cls(count) if count == total else cls(count, first)

    @property
    def all(self) -> bool:
        """Every row, in order."""
        return self.start is None and self.index is None

    def indices(self) -> Iterable[int]:
        """The rows of a slice or an index, one by one."""
        if self.index is not None:
            rows: list[int] = self.index.tolist()
            return rows
        begin = self.start or 0
        return range(begin, begin + self.count)

    def on(self, device: torch.device) -> Tensor:
        """The index on `device`, moved once and without waiting."""
        assert self.index is not None
        if device not in self._moved:
            self._moved[device] = to_device(self.index, device)
        return self._moved[device]

    def take(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """These rows of `tensor`: itself, a view, or a gather."""
        if self.all:
            return tensor
        if self.start is not None:
            return tensor.narrow(dim, self.start, self.count)
        return tensor.index_select(dim, self.on(tensor.device))

    def put(self, target: Tensor, rows: Tensor, dim: int = 0) -> None:
        """Write `rows` at these rows of `target`, in its dtype."""
        if self.index is None:
            self.take(target, dim).copy_(rows)
        else:
            target.index_copy_(dim, self.on(target.device), rows.to(target.dtype))

    def add(self, target: Tensor, rows: Tensor) -> None:
        """Add `rows` to these rows of `target`."""
        if self.index is None:
            self.take(target).add_(rows)
        else:
            target.index_add_(0, self.on(target.device), rows.to(target.dtype))


@dataclass(frozen=True)
class Call:
    """One packed kernel call: the rows that it takes, how they are packed, and the band of all its sequences."""

    queries: RowSet
    keys: RowSet
    sequences: PackedSequences
    causal: bool
    window_size: tuple[int, int] | None

    @property
    def scores(self) -> int:
        """How many scores its kernel computes, hidden ones of the band not among them."""
        pairs = zip(self.sequences.lengths, self.sequences.lengths_k, strict=True)
        left, right = self.window_size or (-1, 0 if self.causal else -1)
        return sum(visible_pairs(queries, keys, left, right) for queries, keys in pairs)


def calls(found: Iterable[Block], total_q: int, total_k: int) -> tuple[Call, ...]:
    """The calls for all blocks of a hop, on tensors of `total_q` query rows and `total_k` key rows.

    No call has a query row twice: its results are merged into one row each.
    """
    grouped: dict[tuple[int, int, int], list[Block]] = {}
    taken: dict[tuple[int, int, int], list[Runs]] = {}
    for block in found:
        turn = 0
        while any(_meet(block.queries, runs) for runs in taken.get((block.left, block.right, turn), ())[-4:]):
            turn += 1
        grouped.setdefault((block.left, block.right, turn), []).append(block)
        taken.setdefault((block.left, block.right, turn), []).append(block.queries)
    return tuple(_call(left, right, group, total_q, total_k) for (left, right, _), group in grouped.items())


def _call(left: int, right: int, group: Sequence[Block], total_q: int, total_k: int) -> Call:
    lengths, lengths_k = (
        [sum(count for _, count in runs) for runs in sides]
        for sides in ([b.queries for b in group], [b.keys for b in group])
    )
    return Call(
        RowSet.of([run for block in group for run in block.queries], total_q),
        RowSet.of([run for block in group for run in block.keys], total_k),
        PackedSequences.from_lengths(lengths, lengths_k),
        left < 0 and right == 0,
        (left, right) if left >= 0 or right > 0 else None,
    )


def _meet(first: Runs, second: Runs) -> bool:
    return any(a < d + e and d < a + b for a, b in first for d, e in second)


def visible_pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs inside a bottom-right band of `queries` x `keys`; -1 is unlimited."""
    total = queries * keys
    if right >= 0:
        total -= _staircase(queries, keys, right)
    if left >= 0:
        total -= _staircase(queries, keys, left + queries - keys)
    return total


def visible_to(first: int, last: int, queries: int, keys: int, left: int, right: int) -> int:
    """Those of the queries `first` to `last` of `queries`, in the same band."""
    shift = keys - queries
    seen = keys if right < 0 else min(keys, last + shift + right)
    if last <= first or seen <= 0:
        return 0
    # The band of the rectangle of these queries and the keys up to the last that they see.
    edges = (-1 if left < 0 else left + seen - last - shift, -1 if right < 0 else right + last + shift - seen)
    return visible_pairs(last - first, seen, *edges)


def _staircase(queries: int, keys: int, edge: int) -> int:
    """`sum(min(max(i - edge, 0), keys) for i in range(queries))`: the pairs beyond one edge of a band."""
    rising = range(max(0, edge), min(queries, edge + keys))
    steps = sum((rising[0], rising[-1])) * len(rising) // 2 - edge * len(rising) if rising else 0
    return steps + max(0, queries - max(0, edge + keys)) * keys
