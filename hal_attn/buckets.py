"""The plan of the padded route: which sequences of a packed batch share a call, and where their rows lie.

```
lengths 300 6 6 6 4 7 300      bucket 1: the first 300, a view of the packed rows, nothing copied
                               bucket 2: the three of 6, one view; 4 and 7 join it where a call costs more than the
                                         copies and the padding that it saves
                               bucket 3: the last 300, a view
```

Neighbours in length share a bucket while that is cheaper, by a small model of what a call, a copy and a score cost
(`Costs`). So time stays near the best of one call a sequence, one padded call and anything between, and memory follows
the tokens.

Rows are padded in front, which keeps causal, windows and ALiBi exact: with the ends aligned, the bottom-right
diagonal of the padded call is the diagonal of every sequence in it, whatever their lengths. A causal bucket of
sequences with as many queries as keys is padded behind instead: the triangle hides the padding, without a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hal_attn.backend import AttentionMetadata, AttentionMetadataBuilder
from hal_attn.packing import PackedSequences, rows_of
from hal_attn.request import AttentionRequest
from hal_attn.transfer import to_device


@dataclass(frozen=True, slots=True)
class Costs:
    """What decides whether sequences share a call, as multiply-adds that the same time would do.

    Attributes:
        call: one more call of the kernel and of what prepares it.
        copy: one element gathered or put back, where rows are no view.
        masked: how many times `copy` where a key mask is needed as well.
    """

    call: float
    copy: float
    masked: float


# Measured on two cores of an AMD EPYC with PyTorch 2.13, float32 (docs/performance.md): a call 25 to 30 us, a copied
# element half a nanosecond. The others are estimates from bandwidth and launch time, until an accelerator is measured.
COSTS = {"cpu": Costs(call=6e5, copy=12, masked=3)}
ACCELERATOR_COSTS = Costs(call=1e9, copy=200, masked=3)


@dataclass(frozen=True)
class Rows:
    """Where the rows of a bucket lie in the packed tensor: `start` where they follow one another, else an index."""

    count: int
    length: int
    start: int | None
    index: Tensor | None

    def take(self, packed: Tensor) -> Tensor:
        """`[T, H, D]` -> `[count, length, H, D]`: a view where the rows follow one another, else a gather."""
        if self.start is not None:
            rows = packed[self.start : self.start + self.count * self.length]
        else:
            assert self.index is not None
            rows = packed.index_select(0, self.index)
        batch: Tensor = rows.unflatten(0, (self.count, self.length))
        return batch


@dataclass(frozen=True)
class Bucket:
    """Sequences that share one call. `members` are their indices, `index` the same on the device; `key_mask`
    `[count, length]` hides padded keys."""

    members: tuple[int, ...]
    index: Tensor
    queries: Rows
    keys: Rows
    key_mask: Tensor | None

    def take(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Packed tensors -> those of the call, `[count, length, H, D]`."""
        return self.queries.take(query), self.keys.take(key), self.keys.take(value)


@dataclass(frozen=True)
class Place:
    """Where output rows go: the packed rows `rows` take the output rows `taken`; None is all of them.

    `start` instead of `rows` where the packed rows follow one another and all output rows are taken.
    """

    start: int | None
    rows: Tensor | None = None
    taken: Tensor | None = None


@dataclass(frozen=True)
class PaddedPlan(AttentionMetadata):
    """The buckets of a batch, and where each one's output rows go.

    Attributes:
        tokens_q: query rows of the batch; `missing` of them are in no bucket, their sequences have no keys.
        places: of each bucket in turn, and last of the missing rows where there are any.
        restore: the same as one index: for each query row its place among the outputs, one bucket after another; None
            where they already lie in the order of the packed rows.
    """

    buckets: tuple[Bucket, ...]
    tokens_q: int
    missing: int
    places: tuple[Place, ...]
    restore: Tensor | None

    @cached_property
    def whole(self) -> tuple[int, int, int] | None:
        """(sequences, queries each, keys each) where one unpadded call over views answers everything, else None."""
        if len(self.buckets) != 1 or self.restore is not None:
            return None
        queries, keys = self.buckets[0].queries, self.buckets[0].keys
        if queries.start != 0 or keys.start != 0 or self.buckets[0].key_mask is not None:
            return None
        if keys.count * keys.length != sum(self.sequences.lengths_k):
            # Keys of a sequence without queries lie behind or between; a view of all rows would let them in.
            return None
        return queries.count, queries.length, keys.length


@dataclass(frozen=True)
class _Group:
    """Sequences that will share a call, before their rows are known; `view` where their rows follow one another."""

    members: tuple[int, ...]
    len_q: int
    len_k: int
    view: bool
    exact: bool = True

    def cost(self, costs: Costs, width: int) -> float:
        rows = 0 if self.view else self.len_q + self.len_k
        copies = costs.copy * rows * (1 if self.exact else costs.masked)
        return costs.call + len(self.members) * width * (self.len_q * self.len_k + copies)

    def joined(self, other: _Group) -> _Group:
        same = (self.len_q, self.len_k) == (other.len_q, other.len_k)
        members = self.members + other.members
        lengths = max(self.len_q, other.len_q), max(self.len_k, other.len_k)
        return _Group(members, *lengths, view=False, exact=same and self.exact and other.exact)


class PaddedMetadataBuilder(AttentionMetadataBuilder):
    """Makes a `PaddedPlan`. Lengths must be known on the host, else they are read from the device, which waits for it.

    Args:
        key_padding: the backend takes a key padding mask, so sequences of different lengths may share a call.
    """

    def __init__(self, key_padding: bool) -> None:
        self.key_padding = key_padding

    def key(self, request: AttentionRequest) -> object:
        return (PaddedPlan, self.key_padding, request.device, _width(request), _padded_behind(request))

    def build(self, sequences: PackedSequences, request: AttentionRequest) -> PaddedPlan:
        behind = _padded_behind(request)
        costs = COSTS.get(request.device.type, ACCELERATOR_COSTS)
        runs = _runs(sequences.lengths, sequences.lengths_k)
        groups = _join(runs, costs, _width(request), mixed=self.key_padding or behind)
        groups.sort(key=lambda group: group.members[0])
        return _PlanMaker(sequences, request.device, behind).plan(groups)


def _width(request: AttentionRequest) -> int:
    """Elements of one token's row of key and value, or of query and output."""
    return request.heads * (request.head_dim + request.value_head_dim)


def _padded_behind(request: AttentionRequest) -> bool:
    return request.causal and request.equal_lengths


def _runs(lengths: tuple[int, ...], lengths_k: tuple[int, ...]) -> list[_Group]:
    """Sequences of the same lengths that follow one another, shortest first; those without queries or keys left out."""
    alive = [(index, *pair) for index, pair in enumerate(zip(lengths, lengths_k, strict=True)) if all(pair)]
    runs = []
    for (queries, keys), run in itertools.groupby(alive, key=lambda item: item[1:]):
        runs.append(_Group(tuple(index for index, _, _ in run), queries, keys, view=True))
    return sorted(runs, key=lambda group: (group.len_k, group.len_q))


def _join(groups: Iterable[_Group], costs: Costs, width: int, mixed: bool) -> list[_Group]:
    """Neighbours joined while one call costs less than two; of different lengths only with `mixed`."""
    joined: list[_Group] = []
    for group in groups:
        if joined:
            both = joined[-1].joined(group)
            apart = joined[-1].cost(costs, width) + group.cost(costs, width)
            if (mixed or both.exact) and both.cost(costs, width) <= apart:
                joined[-1] = both
                continue
        joined.append(group)
    return joined


class _PlanMaker:
    """Turns groups into buckets of rows on one device, and says where their output rows go."""

    def __init__(self, sequences: PackedSequences, device: torch.device, behind: bool) -> None:
        self.sequences, self.device, self.behind = sequences, device, behind
        self.lengths, self.lengths_k = sequences.lengths, sequences.lengths_k
        self.starts = list(itertools.accumulate(self.lengths, initial=0))
        self.starts_k = list(itertools.accumulate(self.lengths_k, initial=0))

    def plan(self, groups: list[_Group]) -> PaddedPlan:
        """The plan whose buckets are `groups`."""
        buckets = tuple(self._bucket(group) for group in groups)
        places = [self._place(group, bucket) for group, bucket in zip(groups, buckets, strict=True)]
        missing = rows_of(self.lengths, [not keys for keys in self.lengths_k])
        if missing.numel():
            places.append(Place(None, self._moved(missing)))
        sizes = [bucket.queries.count * bucket.queries.length for bucket in buckets] + [missing.numel()]
        return PaddedPlan(
            self.sequences,
            self.device,
            buckets,
            self.starts[-1],
            missing.numel(),
            tuple(places),
            self._restore(places, sizes),
        )

    def _bucket(self, group: _Group) -> Bucket:
        queries, _ = self._rows(group.members, group.len_q, self.starts, self.lengths)
        keys, mask = self._rows(group.members, group.len_k, self.starts_k, self.lengths_k)
        index = self._moved(torch.tensor(group.members, dtype=torch.int64))
        return Bucket(group.members, index, queries, keys, None if self.behind else mask)

    def _place(self, group: _Group, bucket: Bucket) -> Place:
        if bucket.queries.start is not None:
            return Place(bucket.queries.start)
        rows, taken = [], []
        for number, member in enumerate(group.members):
            start, length = self.starts[member], self.lengths[member]
            first = number * group.len_q + (0 if self.behind else group.len_q - length)
            rows.append(torch.arange(start, start + length))
            taken.append(torch.arange(first, first + length))
        exact = all(self.lengths[member] == group.len_q for member in group.members)
        return Place(None, self._moved(torch.cat(rows)), None if exact else self._moved(torch.cat(taken)))

    def _restore(self, places: list[Place], sizes: list[int]) -> Tensor | None:
        """`PaddedPlan.restore`, from the places of outputs with `sizes` rows."""
        begins = list(itertools.accumulate(sizes, initial=0))
        if all(place.start == begin for place, begin in zip(places, begins, strict=False)):
            return None
        restore = torch.empty(self.starts[-1], dtype=torch.long, device=self.device)
        for place, begin, size in zip(places, begins, sizes, strict=False):
            taken = torch.arange(size, device=self.device) if place.taken is None else place.taken
            if place.rows is None:
                restore[place.start : (place.start or 0) + size] = begin + taken
            else:
                restore[place.rows] = begin + taken
        return restore

    def _moved(self, index: Tensor) -> Tensor:
        return to_device(index, self.device)

    def _rows(
        self, members: tuple[int, ...], length: int, starts: list[int], lengths: tuple[int, ...]
    ) -> tuple[Rows, Tensor | None]:
        """The rows of `members`, each padded to `length`, and the mask of those that are real (None: all)."""
        count = len(members)
        own = torch.tensor([lengths[member] for member in members])
        first = torch.tensor([starts[member] for member in members])
        exact = bool((own == length).all())
        if exact and bool((first == first[0] + length * torch.arange(count)).all()):
            return Rows(count, length, int(first[0]), None), None
        place = torch.arange(length)[None] - (0 if self.behind else (length - own)[:, None])
        real = (place >= 0) & (place < own[:, None])
        # A padded row repeats a row of its own sequence: finite wherever the sequence is, and hidden by the mask.
        index = first[:, None] + place.clamp(min=0).minimum(own[:, None] - 1)
        rows = Rows(count, length, None, self._moved(index.flatten()))
        return rows, None if exact else self._moved(real)
