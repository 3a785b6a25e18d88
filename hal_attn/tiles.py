"""The tiles of `chunked`: how a call is cut, and the scores of one piece with what hides and what was added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Scores of one tile. 4 Mi elements are 16 MiB in float32: large enough that a matrix product is efficient, small beside
# the inputs of a case where it matters.
TILE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class ChunkedOptions:
    """The plain options of one call; the tensors travel beside it."""

    scale: float
    causal: bool = False
    window_size: tuple[int, int] | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to scores or hides them: mask `[B|1, H|1, Sq|1, Sk|1]`, padding `[B, Sk]`, slopes `[B, H]`, sinks
    `[H]`."""

    mask: Tensor | None
    key_padding_mask: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Batches, key heads, queries and keys of one tile, as slices; `index` numbers it for the dropout generator."""

    batch: slice
    kv_heads: slice
    queries: slice
    keys: slice
    index: int

    def head_slice(self, group: int) -> slice:
        return slice(self.kv_heads.start * group, self.kv_heads.stop * group)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def tiles(query: Tensor, key: Tensor, options: ChunkedOptions) -> Iterator[Tile]:
    """Tiles of at most about TILE_ELEMENTS scores: many (batch, head) pairs of a short call, few queries of a long."""
    batch, seqlen_q, heads, _ = query.shape
    seqlen_k, kv_heads = key.shape[1:3]
    row = heads // kv_heads * seqlen_k
    pairs = max(1, TILE_ELEMENTS // max(1, row * min(seqlen_q, 256)))
    batches, heads_each = (min(batch, pairs // kv_heads), kv_heads) if pairs >= kv_heads else (1, pairs)
    step = max(1, TILE_ELEMENTS // (row * batches * heads_each))
    if options.causal or options.window_size is not None:
        # Square-ish tiles waste less on the far side of the diagonal.
        step = min(step, max(128, seqlen_q // 8))
    index = 0
    for b in range(0, batch, batches):
        for h in range(0, kv_heads, heads_each):
            for q in range(0, seqlen_q, step):
                queries = slice(q, min(q + step, seqlen_q))
                yield Tile(
                    slice(b, min(b + batches, batch)),
                    slice(h, min(h + heads_each, kv_heads)),
                    queries,
                    _visible_keys(queries, seqlen_q, seqlen_k, options),
                    index,
                )
                index += 1


def _edges(options: ChunkedOptions) -> tuple[int, int]:
    left, right = options.window_size or (-1, -1)
    return left, 0 if options.causal else right


def _visible_keys(queries: slice, seqlen_q: int, seqlen_k: int, options: ChunkedOptions) -> slice:
    left, right = _edges(options)
    shift = seqlen_k - seqlen_q
    start = 0 if left < 0 else max(0, queries.start + shift - left)
    stop = seqlen_k if right < 0 else min(seqlen_k, queries.stop + shift + right)
    return slice(start, max(start, stop))


class Scores:
    """The scores of one tile, `[b, hkv, g, q, k]`, with what hides and what was added."""

    def __init__(
        self, query: Tensor, key: Tensor, bias: Bias, options: ChunkedOptions, tile: Tile, kept_heads: int
    ) -> None:
        self.tile, self.options, self.bias = tile, options, bias
        self.group = query.shape[2] // kept_heads
        dtype = compute_dtype(query.dtype)
        # [b, q, hkv, g, d] -> [b, hkv, g, q, d]
        heads = tile.head_slice(self.group)
        rows = query[tile.batch, tile.queries, heads].to(dtype).unflatten(2, (-1, self.group))
        self.query = rows.permute(0, 2, 3, 1, 4)
        self.key = key[tile.batch, tile.keys, tile.kv_heads].to(dtype).transpose(1, 2)
        self.seqlen_q, self.seqlen_k = query.shape[1], key.shape[1]
        self.hidden = self._hidden()
        raw = torch.matmul(self.query.flatten(2, 3), self.key.transpose(-1, -2)) * options.scale
        scores = raw.unflatten(2, (self.group, -1))
        if options.softcap > 0:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        self.capped = scores if options.softcap > 0 else None
        added = self._added(dtype)
        if added is not None:
            scores = scores + added
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, -torch.inf)
        self.values = scores

    def part(self, tensor: Tensor) -> Tensor:
        """The tile's part of a `[B|1, H|1, Sq|1, Sk|1]` tensor as `[b|1, hkv|1, g|1, q|1, k|1]`."""
        tile, sizes = self.tile, tensor.shape
        if sizes[0] != 1:
            tensor = tensor[tile.batch]
        if sizes[2] != 1:
            tensor = tensor[:, :, tile.queries]
        if sizes[3] != 1:
            tensor = tensor[:, :, :, tile.keys]
        if sizes[1] == 1:
            return tensor.unsqueeze(2)
        grouped: Tensor = tensor[:, tile.head_slice(self.group)].unflatten(1, (-1, self.group))
        return grouped

    def distance(self) -> Tensor:
        """`|i + Sk - Sq - j|` as `[q, k]`, signed numbers kept out of it."""
        return self._place().abs()

    def _place(self) -> Tensor:
        device = self.query.device
        i = torch.arange(self.tile.queries.start, self.tile.queries.stop, device=device)
        j = torch.arange(self.tile.keys.start, self.tile.keys.stop, device=device)
        return i[:, None] + (self.seqlen_k - self.seqlen_q) - j[None]

    def _hidden(self) -> Tensor | None:
        hidden: Tensor | None = None
        left, right = _edges(self.options)
        if left >= 0 or right >= 0:
            place = self._place()
            hidden = torch.zeros_like(place, dtype=torch.bool)
            if left >= 0:
                hidden |= place > left
            if right >= 0:
                hidden |= place < -right
        mask, padding = self.bias.mask, self.bias.key_padding_mask
        if mask is not None:
            part = self.part(mask)
            part = ~part if part.dtype == torch.bool else torch.isneginf(part)
            hidden = part if hidden is None else hidden | part
        if padding is not None:
            part = ~padding[self.tile.batch, self.tile.keys][:, None, None, None]
            hidden = part if hidden is None else hidden | part
        return hidden

    def _added(self, dtype: torch.dtype) -> Tensor | None:
        added: Tensor | None = None
        mask, slopes = self.bias.mask, self.bias.slopes
        if mask is not None and mask.dtype != torch.bool:
            added = self.part(mask).to(dtype)
        if slopes is not None:
            part = slopes[self.tile.batch, self.tile.head_slice(self.group)].to(dtype).unflatten(1, (-1, self.group))
            slanted = -part[..., None, None] * self.distance().to(dtype)
            added = slanted if added is None else added + slanted
        return added

    def dropout(self) -> Tensor:
        """1/(1-p) where a weight is kept, 0 where it is dropped; the same for the same seed and tile."""
        generator = torch.Generator().manual_seed(self.options.seed + self.tile.index)
        kept = torch.rand(self.values.shape, generator=generator, device="cpu") >= self.options.dropout_p
        return kept.to(self.values.device).to(self.values.dtype) / (1.0 - self.options.dropout_p)

    def times(self, weights: Tensor, rows: Tensor) -> Tensor:
        """`weights [b, hkv, g, q, k] @ rows [b, hkv, k, d]` -> `[b, hkv, g, q, d]`; hidden rows add
        nothing, NaN or not."""
        if self.hidden is None:
            return _product(weights, rows)
        wild = ~torch.isfinite(rows).all(-1) if rows.device.type == "cpu" else None
        if wild is not None and not bool(wild.any()):
            return _product(weights, rows)
        unseen = self.hidden.expand(self.values.shape).all(-2).all(2)
        if wild is None:
            # Looking at the values would wait for the device.
            return _product(weights, rows.masked_fill(unseen.unsqueeze(-1), 0.0))
        rows = rows.masked_fill(unseen.unsqueeze(-1), 0.0)
        columns = (wild & ~unseen).flatten(0, 1).any(0).nonzero().flatten()
        result = _product(weights, rows.index_fill(2, columns, 0.0))
        for column in columns.tolist():
            # Some queries see this key and others do not: a product would hand its NaN to all of them.
            seen = ~self.hidden.expand(self.values.shape)[..., column, None]
            extra = weights[..., column, None] * rows[:, :, None, None, column]
            result = result + torch.where(seen, extra, 0.0)
        return result


def _product(weights: Tensor, rows: Tensor) -> Tensor:
    product: Tensor = torch.matmul(weights.flatten(2, 3), rows).unflatten(2, weights.shape[2:4])
    return product


def put(target: Tensor, tile: Tile, group: int, part: Tensor) -> None:
    """Write `[b, hkv, g, q, d]` into `[B, Sq, H, d]`."""
    target[tile.batch, tile.queries, tile.head_slice(group)] = (
        part.permute(0, 3, 1, 2, 4).flatten(2, 3).to(target.dtype)
    )
