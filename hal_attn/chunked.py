"""Attention in plain PyTorch, a tile of scores at a time: every option, every dtype, any device, with gradients.

Memory follows the inputs, not `Sq * Sk`: scores exist for one tile only (`TILE_ELEMENTS`), forward and backward. A tile
has all the keys that its queries may see, so its softmax is final and nothing is rescaled:

```
            keys
          0 1 2 3 4 5 6 7
queries 0 x x . . . . . .     causal, Sq = 4, Sk = 5 + 3: a tile of two queries reads the keys up to its last
        1 x x x . . . . .     diagonal and from its first window edge; what lies outside costs nothing
```
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

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
class _Bias:
    """What is added to scores or hides them: mask `[B|1, H|1, Sq|1, Sk|1]`, padding `[B, Sk]`, slopes `[B, H]`, sinks
    `[H]`."""

    mask: Tensor | None
    key_padding_mask: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class _Tile:
    """Batches, key heads, queries and keys of one tile, as slices; `index` numbers it for the dropout generator."""

    batch: slice
    kv_heads: slice
    queries: slice
    keys: slice
    index: int

    def head_slice(self, group: int) -> slice:
        return slice(self.kv_heads.start * group, self.kv_heads.stop * group)


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Query `[B, Sq, H, D]`, key `[B, Sk, Hkv, D]`, value `[B, Sk, Hkv, Dv]` -> (`[B, Sq, H, Dv]`, LSE `[B, H, Sq]`).

    Computed in float32, float64 for float64 inputs. Gradients flow to query, key, value, a float mask, sinks and
    slopes, through the output and the LSE. Bitwise repeatable; dropout draws one seed from PyTorch's CPU generator.
    On the CPU a hidden key's values, NaN included, reach nothing; elsewhere that holds for keys hidden from all queries.
    """
    seed = int(torch.randint(0, 2**62, ()).item()) if dropout_p > 0 else 0
    if scale is None:
        scale = float(query.shape[-1]) ** -0.5
    options = ChunkedOptions(scale, causal, window_size, softcap, dropout_p, seed)
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.expand(query.shape[0], query.shape[2])
    output, lse = _ChunkedAttention.apply(query, key, value, mask, key_padding_mask, alibi_slopes, sinks, options)
    return output, lse


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        key_padding_mask: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        options: ChunkedOptions,
    ) -> tuple[Tensor, Tensor]:
        bias = _Bias(mask, key_padding_mask, slopes, sinks)
        output, lse = _forward(query, key, value, bias, options)
        exact_lse = lse if query.dtype == torch.float64 else None
        ctx.save_for_backward(
            query, key, value, mask, key_padding_mask, slopes, sinks, output, lse.float() if exact_lse is None else lse
        )
        ctx.options = options  # type: ignore[attr-defined]
        return output, lse.to(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, padding, slopes, sinks, output, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        wanted = ctx.needs_input_grad  # type: ignore[attr-defined]
        bias = _Bias(mask, padding, slopes, sinks)
        state = _Backward(query, key, value, bias, ctx.options, output, lse, wanted)  # type: ignore[attr-defined]
        return (*state.run(grad_output, grad_lse), None)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(query: Tensor, key: Tensor, options: ChunkedOptions) -> Iterator[_Tile]:
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
                yield _Tile(
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


class _Scores:
    """The scores of one tile, `[b, hkv, g, q, k]`, with what hides and what was added."""

    def __init__(
        self, query: Tensor, key: Tensor, bias: _Bias, options: ChunkedOptions, tile: _Tile, kept_heads: int
    ) -> None:
        self.tile, self.options, self.bias = tile, options, bias
        self.group = query.shape[2] // kept_heads
        dtype = _compute_dtype(query.dtype)
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
        return tensor[:, tile.head_slice(self.group)].unflatten(1, (-1, self.group))

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
        kept = torch.rand(self.values.shape, generator=generator) >= self.options.dropout_p
        return kept.to(self.values.device).to(self.values.dtype) / (1.0 - self.options.dropout_p)

    def times(self, weights: Tensor, rows: Tensor) -> Tensor:
        """`weights [b, hkv, g, q, k] @ rows [b, hkv, k, d]` -> `[b, hkv, g, q, d]`; hidden rows add nothing, NaN or not."""
        if self.hidden is None:
            return _product(weights, rows)
        if rows.device.type != "cpu":
            unseen = self.hidden.expand(self.values.shape).all(-2).all(2)
            return _product(weights, rows.masked_fill(unseen.unsqueeze(-1), 0.0))
        wild = ~torch.isfinite(rows).all(-1).flatten(0, 1).all(0) if rows.numel() else None
        if wild is None or not bool(wild.any()):
            return _product(weights, rows)
        columns = wild.nonzero().flatten()
        tame = rows.index_fill(2, columns, 0.0)
        seen = ~self.hidden.expand(self.values.shape)[..., columns]
        extra = weights[..., columns].unsqueeze(-1) * rows[:, :, columns][:, :, None, None]
        return _product(weights, tame) + torch.where(seen.unsqueeze(-1), extra, 0.0).sum(-2)


def _product(weights: Tensor, rows: Tensor) -> Tensor:
    return torch.matmul(weights.flatten(2, 3), rows).unflatten(2, weights.shape[2:4])


def _put(target: Tensor, tile: _Tile, group: int, part: Tensor) -> None:
    """Write `[b, hkv, g, q, d]` into `[B, Sq, H, d]`."""
    target[tile.batch, tile.queries, tile.head_slice(group)] = part.permute(0, 3, 1, 2, 4).flatten(2, 3).to(target.dtype)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: _Bias, options: ChunkedOptions
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = query.shape
    kv_heads = key.shape[2]
    dtype = _compute_dtype(query.dtype)
    output = query.new_empty(batch, seqlen_q, heads, value.shape[-1])
    lse = query.new_empty(batch, heads, seqlen_q, dtype=dtype)
    for tile in _tiles(query, key, options):
        scores = _Scores(query, key, bias, options, tile, kv_heads)
        sink = _sink_part(bias.sinks, scores, dtype)
        top = scores.values.amax(-1) if scores.values.shape[-1] else scores.values.new_full(
            scores.values.shape[:-1], -torch.inf
        )  # fmt: skip
        if sink is not None:
            top = torch.maximum(top, sink.expand_as(top))
        safe = torch.where(torch.isneginf(top), 0.0, top)
        weights = torch.exp(scores.values - safe.unsqueeze(-1))
        total = weights.sum(-1)
        if sink is not None:
            total = total + torch.exp(sink - safe)
        lse[tile.batch, tile.head_slice(scores.group), tile.queries] = (torch.log(total) + safe).flatten(1, 2)
        if options.dropout_p > 0:
            weights = weights * scores.dropout()
        rows = value[tile.batch, tile.keys, tile.kv_heads].to(dtype).transpose(1, 2)
        divisor = torch.where(total == 0, 1.0, total).unsqueeze(-1)
        _put(output, tile, scores.group, scores.times(weights, rows) / divisor)
    return output, lse


def _sink_part(sinks: Tensor | None, scores: _Scores, dtype: torch.dtype) -> Tensor | None:
    """The tile's sinks as `[hkv, g, 1]`."""
    if sinks is None:
        return None
    return sinks[scores.tile.head_slice(scores.group)].to(dtype).unflatten(0, (-1, scores.group)).unsqueeze(-1)


class _Backward:
    """Gradients of one call, added up tile by tile."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: _Bias,
        options: ChunkedOptions,
        output: Tensor,
        lse: Tensor,
        wanted: tuple[bool, ...],
    ) -> None:
        self.query, self.key, self.value, self.bias, self.options = query, key, value, bias, options
        self.output, self.lse = output, lse
        self.dtype = _compute_dtype(query.dtype)
        self.grads: list[Tensor | None] = [
            torch.zeros_like(tensor, dtype=self.dtype) if wants and tensor is not None else None
            for tensor, wants in zip((query, key, value, bias.mask, None, bias.slopes, bias.sinks), wanted, strict=False)
        ]

    def run(self, grad_output: Tensor, grad_lse: Tensor) -> list[Tensor | None]:
        """Gradients of (query, key, value, mask, padding, slopes, sinks), each in its tensor's dtype."""
        for tile in _tiles(self.query, self.key, self.options):
            self._add(tile, grad_output, grad_lse)
        inputs = (self.query, self.key, self.value, self.bias.mask, None, self.bias.slopes, self.bias.sinks)
        return [
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(self.grads, inputs, strict=True)
        ]

    def _add(self, tile: _Tile, grad_output: Tensor, grad_lse: Tensor) -> None:
        scores = _Scores(self.query, self.key, self.bias, self.options, tile, self.key.shape[2])
        heads, group = tile.head_slice(scores.group), scores.group
        lse = self.lse[tile.batch, heads, tile.queries].unflatten(1, (-1, group))
        lse_grad = grad_lse[tile.batch, heads, tile.queries].to(self.dtype).unflatten(1, (-1, group))
        weights = torch.exp(scores.values - torch.where(torch.isneginf(lse), 0.0, lse).unsqueeze(-1))
        output_grad = self._rows(grad_output, tile, group)
        delta = (output_grad * self._rows(self.output, tile, group)).sum(-1)
        rows = self.value[tile.batch, tile.keys, tile.kv_heads].to(self.dtype).transpose(1, 2)
        weight_grad = torch.matmul(output_grad.flatten(2, 3), rows.transpose(-1, -2)).unflatten(2, (group, -1))
        used = weights
        if self.options.dropout_p > 0:
            kept = scores.dropout()
            weight_grad, used = weight_grad * kept, weights * kept
        score_grad = weights * (weight_grad - (delta - lse_grad).unsqueeze(-1))
        if scores.hidden is not None:
            score_grad = score_grad.masked_fill(scores.hidden, 0.0)
        self._bias_grads(scores, score_grad, (lse_grad - delta), lse)
        if scores.capped is not None:
            score_grad = score_grad * (1.0 - (scores.capped / self.options.softcap) ** 2)
            if scores.hidden is not None:
                score_grad = score_grad.masked_fill(scores.hidden, 0.0)
        grad_q, grad_k, grad_v = self.grads[:3]
        if grad_q is not None:
            _put(grad_q, tile, group, scores.times(score_grad, scores.key) * self.options.scale)
        if grad_k is not None:
            part = torch.matmul(score_grad.flatten(2, 3).transpose(-1, -2), scores.query.flatten(2, 3))
            grad_k[tile.batch, tile.keys, tile.kv_heads] += part.transpose(1, 2) * self.options.scale
        if grad_v is not None:
            part = torch.matmul(used.flatten(2, 3).transpose(-1, -2), output_grad.flatten(2, 3))
            grad_v[tile.batch, tile.keys, tile.kv_heads] += part.transpose(1, 2)

    def _bias_grads(self, scores: _Scores, score_grad: Tensor, sink_grad: Tensor, lse: Tensor) -> None:
        grad_mask, _, grad_slopes, grad_sinks = self.grads[3:]
        tile, heads = scores.tile, scores.tile.head_slice(scores.group)
        if grad_mask is not None:
            target = scores.part(grad_mask)
            target += score_grad.sum_to_size(target.shape)
        if grad_slopes is not None:
            part = -(score_grad * scores.distance().to(self.dtype)).sum((-1, -2))
            grad_slopes[tile.batch, heads] += part.flatten(1, 2)
        if grad_sinks is not None:
            sink = _sink_part(self.bias.sinks, scores, self.dtype)
            assert sink is not None
            share = torch.exp(sink - lse) * sink_grad
            grad_sinks[heads] += share.sum((0, 3)).flatten()

    def _rows(self, tensor: Tensor, tile: _Tile, group: int) -> Tensor:
        rows = tensor[tile.batch, tile.queries, tile.head_slice(group)].to(self.dtype)
        return rows.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)


def chunked_lse(query: Tensor, key: Tensor, **options: object) -> Tensor:
    """The LSE `[B, H, Sq]` alone, without gradient, for a kernel that does not return it; options of
    `chunked_attention` but dropout."""
    nothing = key.new_zeros(*key.shape[:3], 1)
    with torch.no_grad():
        return chunked_attention(query, key, nothing, **options)[1]  # type: ignore[arg-type]
