"""The local attention of one hop, and its gradients: packed calls by blocks, or one batched call where a mask is given.

Both are the same functions that a user calls; the backend is the one that the group agreed on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hal_attn import registry as registries
from hal_attn.backend import AttentionBackend
from hal_attn.binding import explain_call
from hal_attn.chunked import chunked_gradients
from hal_attn.functional import attention, explain, varlen_attention
from hal_attn.packing import PackedSequences
from hal_attn.selection import require
from hal_attn.sequence_parallel.blocks import Band
from hal_attn.sequence_parallel.costs import Costs, added, costs_of
from hal_attn.sequence_parallel.work import Call, RowSet
from hal_attn.settings import fingerprint, read
from hal_attn.transfer import to_device


class Given(NamedTuple):
    """Saved for the gradients, all rows: output `[T, H, Dv]`, LSE `[H, T]`, and the gradients of both; None of the LSE
    where nothing depends on it."""

    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None

    def take(self, rows: RowSet) -> Given:
        """The same of some rows."""
        grad_lse = None if self.grad_lse is None else rows.take(self.grad_lse, 1)
        return Given(rows.take(self.output), rows.take(self.lse, 1), rows.take(self.grad_output), grad_lse)

    @property
    def of_lse(self) -> Tensor:
        """The gradient of the LSE, 0 where nothing depends on it."""
        return torch.zeros_like(self.lse) if self.grad_lse is None else self.grad_lse


class Gradient(NamedTuple):
    """Gradients of the rows of one call, in their dtype or in float32; a key row may be among them twice."""

    queries: RowSet
    query: Tensor
    keys: RowSet
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Settings:
    """The plain options of an attention call under a plan, and the backend that its group agreed on (None: any)."""

    scale: float
    softcap: float
    deterministic: bool
    backend: str | Sequence[str] | None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of `attention` and `varlen_attention`."""
        return {"scale": self.scale, "softcap": self.softcap, "deterministic": self.deterministic, "return_lse": True}


class LocalKernel(ABC):
    """What a rank computes at each hop, from its queries and the keys at hand."""

    @property
    @abstractmethod
    def most_results(self) -> int:
        """How many results, over all hops, `forward` has for a query row at most."""

    @abstractmethod
    def calls_at(self, hop: int) -> int:
        """How many calls that hop has: no key has more gradients there."""

    @abstractmethod
    def forward(
        self, hop: int, query: Tensor, key: Tensor, value: Tensor, heads: slice, settings: Settings
    ) -> Iterator[tuple[RowSet, Tensor, Tensor]]:
        """(query rows, output `[T', H, Dv]`, LSE `[H, T']`) of each call. `heads` are these query heads among all."""

    @abstractmethod
    def backward(
        self, hop: int, query: Tensor, key: Tensor, value: Tensor, given: Given, heads: slice, settings: Settings
    ) -> Iterator[Gradient]:
        """The gradients of each call of `forward`."""

    @abstractmethod
    def backends(self, query: Tensor, key: Tensor, value: Tensor, settings: Settings) -> Costs | None:
        """The backends that take every call of this rank, best first, and what all calls cost; None where it has none.
        Tensors are shapes only. HAL_ATTN_AUTOTUNE=on measures here, by shapes.

        Raises:
            UnsupportedAttentionError, BackendNotAvailableError: a call that none takes.
        """


@dataclass(frozen=True)
class PackedKernel(LocalKernel):
    """Packed calls: `calls[hop]`."""

    calls: tuple[tuple[Call, ...], ...]

    @cached_property
    def most_results(self) -> int:
        found: Counter[int] = Counter()
        whole = 0
        for rows in (call.queries for hop in self.calls for call in hop):
            whole += rows.all
            found.update(() if rows.all else rows.indices())
        return whole + max(found.values(), default=0)

    def calls_at(self, hop: int) -> int:
        return len(self.calls[hop])

    def forward(
        self, hop: int, query: Tensor, key: Tensor, value: Tensor, heads: slice, settings: Settings
    ) -> Iterator[tuple[RowSet, Tensor, Tensor]]:
        for call in self.calls[hop]:
            rows = (call.queries.take(query), call.keys.take(key), call.keys.take(value))
            result = varlen_attention(
                *rows,
                sequences=call.sequences,
                causal=call.causal,
                window_size=call.window_size,
                backend=settings.backend,
                **settings.options(),
            )
            output, lse = cast("tuple[Tensor, Tensor]", result)
            yield call.queries, output, lse

    def backward(
        self, hop: int, query: Tensor, key: Tensor, value: Tensor, given: Given, heads: slice, settings: Settings
    ) -> Iterator[Gradient]:
        for call in self.calls[hop]:
            rows = (call.queries.take(query), call.keys.take(key), call.keys.take(value))
            query_grad, key_grad, value_grad = _packed_gradients(call, rows, given.take(call.queries), settings)
            yield Gradient(call.queries, query_grad, call.keys, key_grad, value_grad)

    def backends(self, query: Tensor, key: Tensor, value: Tensor, settings: Settings) -> Costs | None:
        costs: Costs | None = None
        for call in (call for hop in self.calls for call in hop):
            shaped = (
                _shaped(query, call.queries.count),
                _shaped(key, call.keys.count),
                _shaped(value, call.keys.count),
            )
            band = {"causal": call.causal, "window_size": call.window_size}
            costs = added(costs, _costs(shaped, settings, call.sequences, **band))
        return costs


def _costs(tensors: Sequence[Tensor], settings: Settings, sequences: PackedSequences | None, **options: Any) -> Costs:
    """Of one call; raises where no backend takes it."""
    query, key, value = tensors
    registry, options = registries.default_registry(), {**options, **settings.options()}
    found = explain_call(registry, query, key, value, sequences, options, settings.backend, measure=True)
    require(found, registry, read())
    return costs_of(found)


def _shaped(tensor: Tensor, rows: int) -> Tensor:
    """A tensor of `rows` rows like this one, without memory of its own."""
    return tensor.new_empty(1).expand(rows, *tensor.shape[1:])


def _packed_gradients(
    call: Call, rows: tuple[Tensor, Tensor, Tensor], given: Given, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    if settings.softcap == 0 and given.grad_lse is None:
        for backend in _with_backward(call, rows, settings):
            found = backend.backward_varlen(
                given.grad_output,
                *rows,
                given.output,
                given.lse,
                sequences=call.sequences,
                scale=settings.scale,
                causal=call.causal,
                window_size=call.window_size,
                deterministic=settings.deterministic,
            )
            if found is not None:
                return found
    lengths, lengths_k = list(call.sequences.lengths), list(call.sequences.lengths_k)
    parts = [tensor.split(length) for tensor, length in zip(rows, (lengths, lengths_k, lengths_k), strict=True)]
    parts += [given.output.split(lengths), given.lse.split(lengths, 1)]
    parts += [given.grad_output.split(lengths), given.of_lse.split(lengths, 1)]
    found_by_sequence = [
        chunked_gradients(
            *(part[None] for part in sequence),
            scale=settings.scale,
            causal=call.causal,
            window_size=call.window_size,
            softcap=settings.softcap,
        )
        for sequence in zip(*parts, strict=True)
    ]
    query, key, value = (torch.cat([found[index][0] for found in found_by_sequence]) for index in range(3))
    return query, key, value


def _with_backward(call: Call, rows: tuple[Tensor, Tensor, Tensor], settings: Settings) -> tuple[AttentionBackend, ...]:
    """Backends of this platform that take the call and have a backward pass for some of the keys, the fastest first; an
    inference kernel may have made the output."""

    def find() -> tuple[AttentionBackend, ...]:
        options = {"causal": call.causal, "window_size": call.window_size, "scale": settings.scale}
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in rows]
            selection = explain(*leaves, sequences=call.sequences, **options)  # type: ignore[arg-type]
        able = (candidate.backend for candidate in selection.considered if not candidate.refusals)
        none = AttentionBackend.backward_varlen
        return tuple(backend for backend in able if type(backend).backward_varlen is not none)

    shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in rows)
    return call.sequences.memo(("backward", shapes, settings.scale, fingerprint()), find)


@dataclass(frozen=True)
class MaskedHop:
    """One hop of a dense batch, whose sequences are alike.

    Attributes:
        queries, keys: the rows, sequence after sequence; `count`, `count_k` of each sequence.
        positions, positions_k: their places in a sequence, as rows of its whole mask.
        visible: the pairs in the band, bool `[count, count_k]`.
    """

    queries: RowSet
    keys: RowSet
    count: int
    count_k: int
    positions: RowSet
    positions_k: RowSet
    visible: Tensor
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def empty(self) -> bool:
        """No query sees a key."""
        return not self.visible.any()

    def hidden_on(self, device: torch.device) -> Tensor | None:
        """The pairs outside the band, `[1, 1, count, count_k]`, moved once and without waiting; None without any."""
        if self.visible.all():
            return None
        if device not in self._moved:
            self._moved[device] = to_device(~self.visible[None, None], device)
        return self._moved[device]


@dataclass(frozen=True)
class MaskedKernel(LocalKernel):
    """One batched call a hop, with the whole mask cut to its queries and keys, and the band in the mask.

    Attributes:
        batch: sequences, all of the same length.
        mask: whole, broadcastable to `[B, H, Sq, Sk]`; key_padding_mask: whole, `[B, Sk]`.
    """

    hops: tuple[MaskedHop, ...]
    batch: int
    mask: Tensor | None
    key_padding_mask: Tensor | None

    @property
    def most_results(self) -> int:
        return len(self.hops)

    def calls_at(self, hop: int) -> int:
        return 1

    def forward(
        self, hop: int, query: Tensor, key: Tensor, value: Tensor, heads: slice, settings: Settings
    ) -> Iterator[tuple[RowSet, Tensor, Tensor]]:
        where = self.hops[hop]
        if where.empty:
            return
        query, key, value = self._rows(where, query, key, value)
        result = attention(
            query,
            key,
            value,
            backend=settings.backend,
            **self._masks(where, heads, query.device),
            **settings.options(),
        )
        output, lse = cast("tuple[Tensor, Tensor]", result)
        yield where.queries, output.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    def backward(
        self, hop: int, query: Tensor, key: Tensor, value: Tensor, given: Given, heads: slice, settings: Settings
    ) -> Iterator[Gradient]:
        where = self.hops[hop]
        if where.empty:
            return
        output, grad_output = (self._batched(tensor, where.queries) for tensor in (given.output, given.grad_output))
        lse, grad_lse = (
            where.queries.take(tensor, 1).unflatten(1, (self.batch, -1)).transpose(0, 1)
            for tensor in (given.lse, given.of_lse)
        )
        grads = chunked_gradients(
            *self._rows(where, query, key, value),
            output,
            lse,
            grad_output,
            grad_lse,
            scale=settings.scale,
            softcap=settings.softcap,
            **self._masks(where, heads, query.device),
        )
        flat = [gradient.flatten(0, 1) for gradient in grads]
        yield Gradient(where.queries, flat[0], where.keys, flat[1], flat[2])

    def backends(self, query: Tensor, key: Tensor, value: Tensor, settings: Settings) -> Costs | None:
        costs: Costs | None = None
        for where in self.hops:
            if where.empty:
                continue
            shaped = [
                _shaped(tensor, self.batch * count).unflatten(0, (self.batch, count))
                for tensor, count in zip((query, key, value), (where.count, where.count_k, where.count_k), strict=True)
            ]
            masks = self._masks(where, slice(0, query.shape[1]), query.device)
            costs = added(costs, _costs(shaped, settings, None, **masks))
        return costs

    def _rows(self, where: MaskedHop, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._batched(query, where.queries), self._batched(key, where.keys), self._batched(value, where.keys)

    def _batched(self, tensor: Tensor, rows: RowSet) -> Tensor:
        """`[T, ...]` -> the rows of each sequence, `[B, n', ...]`."""
        batched: Tensor = rows.take(tensor).unflatten(0, (self.batch, -1))
        return batched

    def _masks(self, where: MaskedHop, heads: slice, device: torch.device) -> dict[str, Any]:
        hidden, mask = where.hidden_on(device), self.mask
        if mask is not None:
            mask = mask if mask.shape[1] == 1 else mask[:, heads]
            for dim, positions in ((2, where.positions), (3, where.positions_k)):
                mask = mask if mask.shape[dim] == 1 else positions.take(mask, dim)
        if hidden is not None:
            if mask is None:
                mask = ~hidden
            elif mask.dtype == torch.bool:
                mask = mask & ~hidden
            else:
                mask = mask.masked_fill(hidden, -torch.inf)
        padding = self.key_padding_mask
        return {"mask": mask, "key_padding_mask": None if padding is None else where.positions_k.take(padding, 1)}


def band_between(positions_q: Tensor, positions_k: Tensor, band: Band) -> Tensor:
    """Bool `[Sq', Sk']`: which keys at `positions_k` the queries at `positions_q` see."""
    ahead = positions_k[None] - positions_q[:, None] - band.shift
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if band.right >= 0:
        visible &= ahead <= band.right
    if band.left >= 0:
        visible &= ahead >= -band.left
    return visible
