"""Packed attention on a backend that only knows batches: sequences of like length share one padded call.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from hal_attn.backend import AttentionBackend, AttentionMetadata, AttentionMetadataBuilder, AttentionResult
from hal_attn.errors import UnsupportedAttentionError
from hal_attn.packing import PackedSequences
from hal_attn.request import AttentionRequest


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
    """Sequences that share one call. `members` are their indices, `key_mask` `[count, length]` hides padded keys."""

    members: tuple[int, ...]
    queries: Rows
    keys: Rows
    key_mask: Tensor | None


# Where a bucket's output rows go: from one packed row on, or (packed rows, which of the output rows; None: all).
Place = int | tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class PaddedPlan(AttentionMetadata):
    """The buckets of a batch, and `restore`: for each query row its place in the buckets' outputs one after another.

    `restore` is None where they already lie in the order of the packed rows; `tokens_q` is the number of query rows.
    `places` says the same for each bucket apart, and last for the rows that no bucket has.
    """

    buckets: tuple[Bucket, ...]
    restore: Tensor | None
    tokens_q: int
    places: tuple[Place, ...]

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
        width = request.heads * (request.head_dim + request.value_head_dim)
        return (PaddedPlan, self.key_padding, request.device, width, self._padded_behind(request))

    def build(self, sequences: PackedSequences, request: AttentionRequest) -> PaddedPlan:
        width = request.heads * (request.head_dim + request.value_head_dim)
        behind = self._padded_behind(request)
        costs = COSTS.get(request.device.type, ACCELERATOR_COSTS)
        runs = _runs(sequences.lengths, sequences.lengths_k)
        groups = _join(runs, costs, width, mixed=self.key_padding or behind)
        groups = sorted(groups, key=lambda group: group.members[0])
        make = _BucketMaker(sequences, request.device, behind)
        buckets = tuple(make(group) for group in groups)
        places = make.places(groups, buckets)
        return PaddedPlan(
            sequences, request.device, buckets, make.restore(groups, buckets), sum(sequences.lengths), places
        )

    def _padded_behind(self, request: AttentionRequest) -> bool:
        return request.causal and request.equal_lengths


def run_padded_attention(
    backend: AttentionBackend, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, **options: object
) -> AttentionResult:
    """Packed attention on `backend.forward`: query `[Tq, H, D]`, key `[Tk, Hkv, D]`, value `[Tk, Hkv, Dv]` ->
    `[Tq, H, Dv]` and, with `return_lse`, LSE `[H, Tq]`.

    `options` are those of `varlen_attention`. Sequences without queries or keys are answered by rule: output 0, LSE
    -inf or the sink, gradient 0. The plan for these sequences is made once and kept with them.

    Raises:
        InvalidAttentionInputError: an argument is wrong.
        UnsupportedAttentionError: `backend` does not take the call.
    """
    from hal_attn.validation import packed_request

    request = packed_request(query, key, value, sequences, options)
    refusals = backend.refusals(request)
    if refusals:
        message = f"{backend.name} does not take this call ({request.describe()})"
        raise UnsupportedAttentionError(message, [(backend.name, refusals)])
    tensors = {name: option for name, option in options.items() if isinstance(option, Tensor)}
    plan = padded_plan(backend, sequences, request)
    return run_plan(backend, plan, query, key, value, {**request.options(), **tensors})


def run_plan(
    backend: AttentionBackend, plan: PaddedPlan, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
) -> AttentionResult:
    """`run_padded_attention` of a call that is checked and planned."""
    slopes: Tensor | None = options.get("alibi_slopes")
    sinks: Tensor | None = options.get("sinks")
    outputs: list[Tensor] = []
    lses: list[Tensor] = []
    with_lse = bool(options.get("return_lse"))
    for bucket in plan.buckets:
        extra = dict(options)
        if bucket.key_mask is not None:
            extra["key_padding_mask"] = bucket.key_mask
        if slopes is not None and slopes.dim() == 2:
            extra["alibi_slopes"] = slopes[list(bucket.members)]
        q, k, v = bucket.queries.take(query), bucket.keys.take(key), bucket.keys.take(value)
        result = backend.forward(q, k, v, **extra)
        if with_lse:
            output, lse = result
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        else:
            output = cast(Tensor, result)
        outputs.append(output.flatten(0, 1))
    output = _assemble(outputs, plan, query.new_zeros(_missing_rows(plan), query.shape[1], value.shape[2]))
    if not any(part.requires_grad for part in outputs):
        output = attached(output, query, key, value, *tensor_options(options))
    if not with_lse:
        return output
    missing = empty_lse((_missing_rows(plan), query.shape[1]), sinks, query.device)
    return output, _assemble(lses, plan, missing).transpose(0, 1)


def tensor_options(options: Mapping[str, object]) -> list[Tensor]:
    """The tensors among `options`."""
    return [option for option in options.values() if isinstance(option, Tensor)]


def padded_plan(backend: AttentionBackend, sequences: PackedSequences, request: AttentionRequest) -> PaddedPlan:
    """The plan for calls like `request`, kept with `sequences` so that all layers share it."""
    return plan_maker(backend, request)(sequences)


def plan_maker(backend: AttentionBackend, request: AttentionRequest) -> Callable[[PackedSequences], PaddedPlan]:
    """`padded_plan` with all but the sequences decided."""
    builder = PaddedMetadataBuilder(backend.capabilities.key_padding_mask)
    key = builder.key(request)
    return lambda sequences: sequences.memo(key, lambda: builder.build(sequences, request))


def empty_lse(shape: tuple[int, ...], sinks: Tensor | None, device: torch.device) -> Tensor:
    """LSE of queries without keys, `[..., H]` float32: -inf, or each head's sink."""
    if sinks is None:
        return torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
    return sinks.to(torch.float32).expand(shape)


def attached(output: Tensor, *inputs: Tensor) -> Tensor:
    """`output`, with a gradient of 0 for each input that wants one: no row of theirs reached it."""
    if not torch.is_grad_enabled():
        return output
    for tensor in inputs:
        if tensor.is_floating_point() and tensor.requires_grad:
            # An empty slice sums to 0 whatever the values are, so a NaN among them stays out.
            output = output + tensor.reshape(-1)[:0].sum().to(output.dtype)
    return output


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


class _BucketMaker:
    """Turns groups into buckets of rows on one device."""

    def __init__(self, sequences: PackedSequences, device: torch.device, behind: bool) -> None:
        self.device = device
        self.behind = behind
        self.lengths, self.lengths_k = sequences.lengths, sequences.lengths_k
        self.starts, self.starts_k = _starts(self.lengths), _starts(self.lengths_k)
        self.tokens_q = sum(self.lengths)

    def __call__(self, group: _Group) -> Bucket:
        queries, _ = self._rows(group.members, group.len_q, self.starts, self.lengths)
        keys, mask = self._rows(group.members, group.len_k, self.starts_k, self.lengths_k)
        return Bucket(group.members, queries, keys, None if self.behind else mask)

    def restore(self, groups: list[_Group], buckets: tuple[Bucket, ...]) -> Tensor | None:
        """Place of each query row among the buckets' output rows, then the rows that no bucket has; None: in order."""
        if all(bucket.queries.start is not None for bucket in buckets) and not _gaps(buckets, self.tokens_q):
            return None
        place = torch.empty(self.tokens_q, dtype=torch.long)
        covered = torch.zeros(self.tokens_q, dtype=torch.bool)
        begin = 0
        for group in groups:
            for member in group.members:
                length, start = self.lengths[member], self.starts[member]
                first = begin if self.behind else begin + group.len_q - length
                place[start : start + length] = torch.arange(first, first + length)
                covered[start : start + length] = True
                begin += group.len_q
        missing = ~covered
        place[missing] = torch.arange(begin, begin + int(missing.sum()))
        return place.to(self.device, non_blocking=True)

    def places(self, groups: list[_Group], buckets: tuple[Bucket, ...]) -> tuple[Place, ...]:
        """For each bucket, and last for the rows that no bucket has, where its output rows go."""
        found: list[Place] = []
        for group, bucket in zip(groups, buckets, strict=True):
            if bucket.queries.start is not None:
                found.append(bucket.queries.start)
                continue
            spans = [(self.starts[m], self.lengths[m]) for m in group.members]
            rows = torch.cat([torch.arange(start, start + length) for start, length in spans])
            exact = all(length == group.len_q for _, length in spans)
            real = None if exact else self._real(spans, group.len_q)
            found.append((self._moved(rows), real))
        alive = torch.tensor([bool(keys) for keys in self.lengths_k], dtype=torch.bool)
        missing = (~alive).repeat_interleave(torch.tensor(self.lengths, dtype=torch.long)).nonzero().flatten()
        return (*found, (self._moved(missing), None)) if missing.numel() else tuple(found)

    def _real(self, spans: list[tuple[int, int]], padded: int) -> Tensor:
        """Which output rows of a padded bucket are no padding."""
        first = [n * padded + (0 if self.behind else padded - length) for n, (_, length) in enumerate(spans)]
        rows = [torch.arange(f, f + length) for f, (_, length) in zip(first, spans, strict=True)]
        return self._moved(torch.cat(rows))

    def _moved(self, index: Tensor) -> Tensor:
        return index.to(self.device, non_blocking=True)

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
        rows = Rows(count, length, None, index.flatten().to(self.device, non_blocking=True))
        return rows, None if exact else real.to(self.device, non_blocking=True)


def _starts(lengths: tuple[int, ...]) -> list[int]:
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    return starts


def _gaps(buckets: tuple[Bucket, ...], tokens_q: int) -> bool:
    """Whether the buckets, one after another, leave out or swap rows."""
    end = 0
    for bucket in buckets:
        if bucket.queries.start != end:
            return True
        end += bucket.queries.count * bucket.queries.length
    return end != tokens_q


def _missing_rows(plan: PaddedPlan) -> int:
    """Query rows that no bucket has: those of sequences without keys."""
    lengths, lengths_k = plan.sequences.lengths, plan.sequences.lengths_k
    return sum(queries for queries, keys in zip(lengths, lengths_k, strict=True) if not keys)


def _assemble(parts: list[Tensor], plan: PaddedPlan, missing: Tensor) -> Tensor:
    """The buckets' rows and the missing ones as rows in packed order."""
    if missing.shape[0]:
        parts = [*parts, missing]
    if len(parts) < 2 and plan.restore is None:
        return parts[0] if parts else missing
    if plan.restore is None or any(part.requires_grad for part in parts):
        rows = torch.cat(parts)
        return rows if plan.restore is None else rows.index_select(0, plan.restore)
    # Without gradients each row is copied once, to its place; in a graph that would be a copy of everything a bucket.
    output = parts[0].new_empty(plan.tokens_q, *parts[0].shape[1:])
    for rows, place in zip(parts, plan.places, strict=True):
        if isinstance(place, int):
            output[place : place + rows.shape[0]] = rows
        else:
            output.index_copy_(0, place[0], rows if place[1] is None else rows.index_select(0, place[1]))
    return output
