"""Attention in plain PyTorch, a tile of scores at a time: every option, every dtype, any device, with gradients.

Memory follows the inputs, not `Sq * Sk`: scores exist for one tile only (`tiles.TILE_ELEMENTS`), both ways. A
tile has all the keys that its queries may see, so its softmax is final and nothing is rescaled:

```
            keys
          0 1 2 3 4 5 6 7
queries 0 x x . . . . . .     causal, Sq = 4, Sk = 5 + 3: a tile of two queries reads the keys up to its last
        1 x x x . . . . .     diagonal and from its first window edge; what lies outside costs nothing
```
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from hal_attn.tiles import Bias, ChunkedOptions, Scores, Tile, compute_dtype, put, tiles


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
    On the CPU a hidden key's values, NaN included, reach nothing; elsewhere that holds for keys that no query sees.
    """
    seed = int(torch.randint(0, 2**62, (), device="cpu").item()) if dropout_p > 0 else 0
    if scale is None:
        scale = float(query.shape[-1]) ** -0.5
    options = ChunkedOptions(scale, causal, window_size, softcap, dropout_p, seed)
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.expand(query.shape[0], query.shape[2])
    result: tuple[Tensor, Tensor] = _ChunkedAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, mask, key_padding_mask, alibi_slopes, sinks, options
    )
    return result


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
        bias = Bias(mask, key_padding_mask, slopes, sinks)
        output, lse = _forward(query, key, value, bias, options)
        saved = (query, key, value, mask, key_padding_mask, slopes, sinks, output, lse)
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]
        ctx.options = options  # type: ignore[attr-defined]
        return output, lse.to(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, padding, slopes, sinks, output, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        wanted = ctx.needs_input_grad  # type: ignore[attr-defined]
        bias = Bias(mask, padding, slopes, sinks)
        state = _Backward(query, key, value, bias, ctx.options, output, lse, wanted)  # type: ignore[attr-defined]
        with torch.autocast(query.device.type, enabled=False):
            return (*state.run(grad_output, grad_lse), None)


def _forward(query: Tensor, key: Tensor, value: Tensor, bias: Bias, options: ChunkedOptions) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = query.shape
    kv_heads = key.shape[2]
    dtype = compute_dtype(query.dtype)
    output = query.new_empty(batch, seqlen_q, heads, value.shape[-1])
    lse = query.new_empty(batch, heads, seqlen_q, dtype=dtype)
    for tile in tiles(query, key, options):
        scores = Scores(query, key, bias, options, tile, kv_heads)
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
        put(output, tile, scores.group, scores.times(weights, rows) / divisor)
    return output, lse


def _sink_part(sinks: Tensor | None, scores: Scores, dtype: torch.dtype) -> Tensor | None:
    """The tile's sinks as `[hkv, g, 1]`."""
    if sinks is None:
        return None
    part: Tensor = sinks[scores.tile.head_slice(scores.group)].to(dtype).unflatten(0, (-1, scores.group))
    return part.unsqueeze(-1)


class _Backward:
    """Gradients of one call, added up tile by tile."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Bias,
        options: ChunkedOptions,
        output: Tensor,
        lse: Tensor,
        wanted: tuple[bool, ...],
    ) -> None:
        self.query, self.key, self.value, self.bias, self.options = query, key, value, bias, options
        self.output, self.lse = output, lse
        self.dtype = compute_dtype(query.dtype)
        self.grads: list[Tensor | None] = [
            torch.zeros_like(tensor, dtype=self.dtype) if wants and tensor is not None else None
            for tensor, wants in zip(
                (query, key, value, bias.mask, None, bias.slopes, bias.sinks), wanted, strict=False
            )
        ]

    def run(self, grad_output: Tensor, grad_lse: Tensor) -> list[Tensor | None]:
        """Gradients of (query, key, value, mask, padding, slopes, sinks), each in its tensor's dtype."""
        self.accumulate(grad_output, grad_lse)
        inputs = (self.query, self.key, self.value, self.bias.mask, None, self.bias.slopes, self.bias.sinks)
        return [
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(self.grads, inputs, strict=True)
        ]

    def accumulate(self, grad_output: Tensor, grad_lse: Tensor) -> None:
        """Adds all tiles' gradients to `grads`, which are in the dtype of computation."""
        for tile in tiles(self.query, self.key, self.options):
            self._add(tile, grad_output, grad_lse)

    def _add(self, tile: Tile, grad_output: Tensor, grad_lse: Tensor) -> None:
        scores = Scores(self.query, self.key, self.bias, self.options, tile, self.key.shape[2])
        heads, group = tile.head_slice(scores.group), scores.group
        lse = self.lse[tile.batch, heads, tile.queries].unflatten(1, (-1, group))
        lse_grad = grad_lse[tile.batch, heads, tile.queries].to(self.dtype).unflatten(1, (-1, group))
        lse = torch.where(torch.isneginf(lse), 0.0, lse)
        weights = torch.exp(scores.values - lse.unsqueeze(-1))
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
            put(grad_q, tile, group, scores.times(score_grad, scores.key) * self.options.scale)
        if grad_k is not None:
            queries = scores.query
            if scores.hidden is not None:
                # A query that sees no key has no say in any gradient, NaN or not.
                queries = queries.masked_fill(scores.hidden.all(-1, keepdim=True), 0.0)
            part = torch.matmul(score_grad.flatten(2, 3).transpose(-1, -2), queries.flatten(2, 3))
            grad_k[tile.batch, tile.keys, tile.kv_heads] += part.transpose(1, 2) * self.options.scale
        if grad_v is not None:
            part = torch.matmul(used.flatten(2, 3).transpose(-1, -2), output_grad.flatten(2, 3))
            grad_v[tile.batch, tile.keys, tile.kv_heads] += part.transpose(1, 2)

    def _bias_grads(self, scores: Scores, score_grad: Tensor, sink_grad: Tensor, lse: Tensor) -> None:
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

    def _rows(self, tensor: Tensor, tile: Tile, group: int) -> Tensor:
        rows = tensor[tile.batch, tile.queries, tile.head_slice(group)].to(self.dtype)
        grouped: Tensor = rows.unflatten(2, (-1, group))
        return grouped.permute(0, 2, 3, 1, 4)


def chunked_lse(query: Tensor, key: Tensor, **options: object) -> Tensor:
    """The LSE `[B, H, Sq]` alone, without gradient, for a kernel that does not return it; options of
    `chunked_attention` but dropout."""
    nothing = key.new_zeros(*key.shape[:3], 1)
    with torch.no_grad():
        return chunked_attention(query, key, nothing, **options)[1]  # type: ignore[arg-type]


def chunked_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor,
    *,
    scale: float,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, float32, for keys that may be only some of those that made `output`
    `[B, Sq, H, Dv]` and `lse` `[B, H, Sq]`: what these keys have a part in, given the whole result."""
    options = ChunkedOptions(scale, causal, window_size, softcap)
    bias = Bias(mask, key_padding_mask, None, None)
    state = _Backward(query, key, value, bias, options, output, lse, (True, True, True, False, False, False, False))
    state.accumulate(grad_output, grad_lse)
    grad_query, grad_key, grad_value = state.grads[:3]
    assert grad_query is not None
    assert grad_key is not None
    assert grad_value is not None
    return grad_query, grad_key, grad_value
