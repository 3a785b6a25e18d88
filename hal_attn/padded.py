"""Packed attention on a backend that only knows batches: sequences of like length share one padded call.

```
lengths 5 2 5 1 9      bucket 1: the two of 5, a view or one gather, without padding
                       bucket 2: 1 and 2, padded to 2, because a call costs more than the rows it would save
                       bucket 3: 9 alone, a view of the packed rows
```

Sequences are sorted by length; neighbours join a bucket while the padding they add costs less than the call they save.
So time stays near the best of one call a sequence, one padded call and anything between, and memory follows the tokens.

Rows are padded in front, which keeps causal, windows and ALiBi exact: with the ends aligned, the bottom-right
diagonal of the padded call is the diagonal of every sequence in it, whatever their lengths. A causal bucket of
sequences with as many queries as keys is padded behind instead: the triangle hides the padding, without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from hal_attn.backend import AttentionBackend, AttentionMetadata, AttentionMetadataBuilder, AttentionResult
from hal_attn.packing import PackedSequences
from hal_attn.request import AttentionRequest

# What one more call costs, as multiply-adds that the same time would do. Measured on two cores of an AMD EPYC with
# PyTorch 2.13 (docs/performance.md); too small a value only costs small batches, too large only pads a little more.
CALL_COST = 1.5e6


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


@dataclass(frozen=True)
class PaddedPlan(AttentionMetadata):
    """The buckets of a batch, and `restore`: for each query row its place in the buckets' outputs one after another.

    `restore` is None where they already lie in the order of the packed rows; `tokens_q` is the number of query rows.
    """

    buckets: tuple[Bucket, ...]
    restore: Tensor | None
    tokens_q: int

    @cached_property
    def whole(self) -> tuple[int, int, int] | None:
        """(sequences, queries each, keys each) where one unpadded call over views answers everything, else None."""
        if len(self.buckets) != 1 or self.restore is not None:
            return None
        queries, keys = self.buckets[0].queries, self.buckets[0].keys
        if queries.start != 0 or keys.start != 0 or self.buckets[0].key_mask is not None:
            return None
        return queries.count, queries.length, keys.length


@dataclass(frozen=True)
class _Group:
    """Sequences that will share a call, before their rows are known."""

    members: tuple[int, ...]
    len_q: int
    len_k: int

    def cost(self, width: int) -> float:
        return CALL_COST + len(self.members) * self.len_q * self.len_k * width

    def joined(self, other: _Group) -> _Group:
        members = self.members + other.members
        return _Group(members, max(self.len_q, other.len_q), max(self.len_k, other.len_k))


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
        groups = _groups(sequences.lengths, sequences.lengths_k)
        if self.key_padding or behind:
            groups = _join(groups, width)
        groups = sorted(groups, key=lambda group: group.members[0])
        make = _BucketMaker(sequences, request.device, behind)
        buckets = tuple(make(group) for group in groups)
        return PaddedPlan(sequences, request.device, buckets, make.restore(groups, buckets), sum(sequences.lengths))

    def _padded_behind(self, request: AttentionRequest) -> bool:
        return request.causal and request.equal_lengths


def run_padded_attention(
    backend: AttentionBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    *,
    request: AttentionRequest | None = None,
    metadata: PaddedPlan | None = None,
    **options: object,
) -> AttentionResult:
    """Packed attention on `backend.forward`: query `[Tq, H, D]`, key `[Tk, Hkv, D]`, value `[Tk, Hkv, Dv]` ->
    `[Tq, H, Dv]` and, with `return_lse`, LSE `[H, Tq]`.

    `options` are those of `varlen_attention`. Sequences without queries or keys are answered by rule: output 0, LSE
    -inf or the sink, gradient 0. `metadata` is the plan for these sequences, made and kept with them where it is None.
    """
    if metadata is None:
        if request is None:
            from hal_attn.validation import packed_request

            request = packed_request(query, key, value, sequences, options)
            options = {**options, **request.options(), "causal": request.causal, "window_size": request.window_size}
        metadata = padded_plan(backend, sequences, request)
    slopes = cast("Tensor | None", options.pop("alibi_slopes", None))
    outputs: list[Tensor] = []
    lses: list[Tensor] = []
    with_lse = bool(options.get("return_lse"))
    for bucket in metadata.buckets:
        extra = dict(options)
        if bucket.key_mask is not None:
            extra["key_padding_mask"] = bucket.key_mask
        if slopes is not None:
            extra["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[list(bucket.members)]
        q, k, v = bucket.queries.take(query), bucket.keys.take(key), bucket.keys.take(value)
        result = backend.forward(q, k, v, **extra)
        if with_lse:
            output, lse = result
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        else:
            output = cast(Tensor, result)
        outputs.append(output.flatten(0, 1))
    sinks = cast("Tensor | None", options.get("sinks"))
    output = _assemble(outputs, metadata, query.new_zeros(_missing_rows(metadata), query.shape[1], value.shape[2]))
    if not any(part.requires_grad for part in outputs):
        output = attached(output, query, key, value)
    if not with_lse:
        return output
    missing = empty_lse((_missing_rows(metadata), query.shape[1]), sinks, query.device)
    return output, _assemble(lses, metadata, missing).transpose(0, 1)


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
        if tensor.requires_grad:
            # An empty slice sums to 0 whatever the values are, so a NaN among them stays out.
            output = output + tensor.reshape(-1)[:0].sum().to(output.dtype)
    return output


def _groups(lengths: tuple[int, ...], lengths_k: tuple[int, ...]) -> list[_Group]:
    """Sequences of the same lengths together, shortest first; those without queries or keys are left out."""
    by_length: dict[tuple[int, int], list[int]] = {}
    for index, (queries, keys) in enumerate(zip(lengths, lengths_k, strict=True)):
        if queries and keys:
            by_length.setdefault((keys, queries), []).append(index)
    return [_Group(tuple(members), queries, keys) for (keys, queries), members in sorted(by_length.items())]


def _join(groups: Iterable[_Group], width: int) -> list[_Group]:
    """Neighbours joined while one padded call costs less than two."""
    joined: list[_Group] = []
    for group in groups:
        if joined:
            both = joined[-1].joined(group)
            if both.cost(width) <= joined[-1].cost(width) + group.cost(width):
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
    if not parts:
        return missing
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows if plan.restore is None else rows.index_select(0, plan.restore)
