"""One attention under a plan: heads exchanged, keys exchanged, states joined; and all of it backward.

```
q k v of my tokens, all heads
  | heads for tokens (ulysses)             the next turn of heads travels while this one is computed
q k v of the ring coordinate, my heads
  | hop by hop: local attention, states joined in float32      the next keys travel while these are computed
  | states of replicated queries joined over the exchange group; sinks joined once
output, LSE of the ring coordinate, my heads
  | tokens for heads
output, LSE of my tokens, all heads
```

Replicated queries attend here to the keys that only this rank holds, and on ring coordinate 0 also to the replicated
ones: so each pair counts once, in the states and in every gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from hal_attn.kernels import with_sinks
from hal_attn.sequence_parallel.exchange import Ending, Exchange
from hal_attn.sequence_parallel.heads import HeadShare, HeadSplit, pipeline
from hal_attn.sequence_parallel.kernel import Given, LocalKernel, Settings
from hal_attn.sequence_parallel.partial import GradientSum, PartialStates
from hal_attn.sequence_parallel.peers import PeerCopies, Tensors
from hal_attn.sequence_parallel.spans import Span
from hal_attn.sequence_parallel.ulysses import Arriving, HeadExchange, SideRows
from hal_attn.sequence_parallel.work import RowSet

_PIPELINE_TURNS = 2
Plans = Sequence[Sequence[HeadShare]]
P = ParamSpec("P")
R = TypeVar("R")


class Turn(NamedTuple):
    """Tensors of one turn of heads after their exchange: query `[Tq, h, D]`, key `[Tk, hkv, D]`, value; then output
    `[Tq, h, Dv]` and LSE `[h, Tq]`."""

    share: HeadShare
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor


def _ended(run: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """Where this method of the engine raises, wherever it does, what is under way by copies is ended."""

    @wraps(run)
    def guarded(engine: Engine, /, *arguments: P.args, **options: P.kwargs) -> R:
        with Ending(*engine._ways):
            return run(engine, *arguments, **options)

    return guarded


@dataclass(frozen=True)
class Engine:
    """What a rank does for every attention of one plan, whatever the tensors.

    Attributes:
        heads: the exchange of heads; None where one rank has them all. queries, keys: the rows on both sides of it.
        exchange: the exchange of keys, among the ranks of `group`; `first` is its coordinate 0.
        replicated_q, replicated_k: rows of the chunk that every rank holds.
        everyone: the group of all ranks of the plan; None for one.
    """

    heads: HeadExchange | None
    queries: SideRows
    keys: SideRows
    ranks: int
    exchange: Exchange
    group: dist.ProcessGroup | None
    first: bool
    replicated_q: RowSet
    replicated_k: RowSet
    rows_q: int
    everyone: dist.ProcessGroup | None

    @cached_property
    def _ways(self) -> tuple[PeerCopies, ...]:
        """Where something may be under way that nothing but this rank ends."""
        ways = (None if self.heads is None else self.heads.peers, self.exchange.peers)
        return tuple(way for way in ways if way is not None)

    # Forward

    @_ended
    def forward(
        self,
        kernel: LocalKernel,
        settings: Settings,
        tensors: tuple[Tensor, Tensor, Tensor],
        sinks: Tensor | None,
        with_lse: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, list[Turn]]:
        """Of query, key and value `[T, H, d]` of this rank's tokens (output `[T, H, Dv]`, LSE `[H, T]` where it is
        wanted), and what `backward` needs, to `keep`."""
        query, key, value = tensors
        split = HeadSplit(query.shape[1], key.shape[1], self.ranks)
        plans = self.turns(split)
        coming = self._there(plans, 0, tensors, keep)
        turns: list[Turn] = []
        leaving: list[Arriving] = []
        results = self._results(split, value, with_lse)
        for index, shares in enumerate(plans):
            here, (q, k, v) = coming, coming.wait()
            if index + 1 < len(plans):
                coming = self._there(plans, index + 1, tensors, keep)
            turns.append(self._attend(kernel, settings, shares[self._coordinate], q, k, v, sinks))
            here.done()
            leaving.append(self._back_states(shares, turns[-1], results, with_lse))
        found = [states.wait() for states in leaving][-1]
        return found[0], found[1].squeeze(-1).transpose(0, 1) if with_lse else None, turns

    def _results(self, split: HeadSplit, value: Tensor, with_lse: bool) -> list[Tensor]:
        """Output `[T, H, Dv]` and, where it is wanted, LSE `[T, H, 1]`, to be filled turn by turn; nothing where no
        heads are exchanged."""
        if self.heads is None:
            return []
        shape = (self.queries.total, split.heads)
        output = value.new_empty(*shape, value.shape[2])
        return [output, value.new_empty(*shape, 1, dtype=torch.float32)] if with_lse else [output]

    def _attend(
        self,
        kernel: LocalKernel,
        settings: Settings,
        share: HeadShare,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
    ) -> Turn:
        dtype = query.dtype if self._joined_once(kernel, sinks) else torch.float32
        states = PartialStates(self.rows_q, query.shape[1], value.shape[2], query.device, dtype)
        heads = slice(*share.queries)
        read_k, read_v = _read(key, share), _read(value, share)

        def consume(hop: int, tensors: tuple[Tensor, ...]) -> None:
            k, v = (read_k, read_v) if hop == 0 else (_read(tensor, share) for tensor in tensors)
            if query.shape[1]:
                for rows, output, lse in kernel.forward(hop, query, k, v, heads, settings):
                    states.add(rows, output, lse)

        self.exchange.forward((key, value), consume)
        self._join_replicated(states)
        output, lse = states.output, states.lse
        if sinks is not None:
            output, lse = with_sinks(output, lse, sinks[heads])
        return Turn(share, query, key, value, output if output.dtype == query.dtype else output.to(query.dtype), lse)

    def _joined_once(self, kernel: LocalKernel, sinks: Tensor | None) -> bool:
        """No row is rounded more than once: it has at most two results, and nothing changes them afterwards."""
        return kernel.most_results <= 2 and sinks is None and not self.replicated_q.count

    def _join_replicated(self, states: PartialStates) -> None:
        """Join what each rank of the exchange found for the replicated queries, in the order of ranks: alike on all."""
        if self.group is None or not self.replicated_q.count:
            return
        own = self.replicated_q.take(states.output).float(), self.replicated_q.take(states.lse, 1)
        packed = torch.cat([own[0], own[1].transpose(0, 1).unsqueeze(-1)], -1).contiguous()
        gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, packed, group=self.group)
        rows, heads, dim = own[0].shape
        joined = PartialStates(rows, heads, dim, packed.device, torch.float32)
        everything = RowSet(rows)
        for part in gathered:
            joined.add(everything, part[..., :-1], part[..., -1].transpose(0, 1))
        states.replace(self.replicated_q, joined.output, joined.lse)

    # Backward

    @_ended
    def backward(
        self,
        kernel: LocalKernel,
        settings: Settings,
        turns: Sequence[Turn],
        sinks: Tensor | None,
        grads: tuple[Tensor, Tensor | None],
        sizes: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of query, key, value `[T, H, d]`, in their dtype or in float32, and of the sinks `[H]`."""
        split = HeadSplit(*sizes, self.ranks)
        plans = self.turns(split)
        coming = self._there_gradients(plans, 0, grads)
        totals = self._gradient_totals(split, turns[0])
        leaving: list[Arriving] = []
        sink_grad = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        for index, (shares, turn) in enumerate(zip(plans, turns, strict=True)):
            here, received = coming, coming.wait()
            if index + 1 < len(plans):
                coming = self._there_gradients(plans, index + 1, grads)
            grad_lse = received[1].squeeze(-1).transpose(0, 1) if grads[1] is not None else None
            given = Given(turn.output, turn.lse, received[0], grad_lse)
            found = self._gradients(kernel, settings, turn, given)
            if sink_grad is not None and sinks is not None:
                self._add_sink_gradient(sink_grad, sinks, turn, given)
            here.done()
            leaving.append(self._back_gradients(shares, found, totals))
        totals = [gradients.wait() for gradients in leaving][-1]
        if sink_grad is not None and self.everyone is not None:
            dist.all_reduce(sink_grad, group=self.everyone)
        return totals[0], totals[1], totals[2], sink_grad

    def _gradient_totals(self, split: HeadSplit, turn: Turn) -> list[Tensor]:
        """Gradients of query, key and value `[T, H, d]`, to be filled turn by turn, as they travel: in the dtype of the
        tensors, and in float32 where several ranks have a part in one."""
        if self.heads is None:
            return []
        dtype = torch.float32 if split.shared else turn.query.dtype
        heads = (split.heads, split.kv_heads, split.kv_heads)
        rows = (self.queries.total, self.keys.total, self.keys.total)
        tensors = (turn.query, turn.key, turn.value)
        return [
            torch.zeros(count, number, tensor.shape[2], dtype=dtype, device=tensor.device)
            for count, number, tensor in zip(rows, heads, tensors, strict=True)
        ]

    def _gradients(
        self, kernel: LocalKernel, settings: Settings, turn: Turn, given: Given
    ) -> tuple[Tensor, Tensor, Tensor]:
        share, heads = turn.share, slice(*turn.share.queries)
        keys = (turn.key, turn.value)
        # What is added up over ranks afterwards is not rounded before; what goes straight home, as kernels do.
        query_sum = _sum_of(turn.query, kernel.most_results, self.replicated_q)
        own = [_sum_of(tensor, kernel.calls_at(0) + self.exchange.coming, self.replicated_k) for tensor in keys]
        travelling = turn.query.dtype if self.exchange.straight else torch.float32

        def contribute(hop: int, tensors: Tensors) -> Tensors:
            sums = own if hop == 0 else [_sum_of(tensor, kernel.calls_at(hop)) for tensor in tensors]
            if turn.query.shape[1]:
                read = [_read(tensor, share) for tensor in tensors]
                for part in kernel.backward(hop, turn.query, read[0], read[1], given, heads, settings):
                    query_sum.add(part.queries, part.query)
                    for key_sum, gradient in zip(sums, (part.key, part.value), strict=True):
                        key_sum.add(part.keys, _written(gradient, share, turn.key.shape[1]))
            return tuple(key_sum.total if hop == 0 else key_sum.total.to(travelling) for key_sum in sums)

        def receive(rows: RowSet, gradients: Tensors) -> None:
            for key_sum, gradient in zip(own, gradients, strict=True):
                key_sum.add(rows, gradient)

        self.exchange.backward(keys, contribute, receive)
        self._sum_replicated(query_sum.total, self.replicated_q)
        for key_sum in own:
            self._sum_replicated(key_sum.total, self.replicated_k)
        return query_sum.total, own[0].total, own[1].total

    def _sum_replicated(self, gradient: Tensor, rows: RowSet) -> None:
        """Add up what each rank of the exchange found for rows that all of them hold."""
        if self.group is not None and rows.count:
            part = rows.take(gradient).float().contiguous()
            dist.all_reduce(part, group=self.group)
            rows.put(gradient, part)

    def _add_sink_gradient(self, total: Tensor, sinks: Tensor, turn: Turn, given: Given) -> None:
        heads = slice(*turn.share.queries)
        delta = (given.grad_output.float() * given.output.float()).sum(-1).transpose(0, 1)
        part = torch.exp(sinks[heads, None].float() - given.lse) * (given.of_lse - delta)
        if not self.first:
            # Replicated queries stand on every rank of the exchange, and count on one.
            self.replicated_q.put(part, torch.zeros_like(self.replicated_q.take(part, 1)), 1)
        total[heads] += part.sum(1)

    # Exchanges of heads; without one, the tensors themselves

    @property
    def _coordinate(self) -> int:
        return 0 if self.heads is None else self.heads.coordinate

    def turns(self, split: HeadSplit) -> Plans:
        """`[turn][rank]` -> its heads."""
        return pipeline(split, 1 if self.heads is None else _PIPELINE_TURNS)

    def _there(self, plans: Plans, index: int, tensors: tuple[Tensor, Tensor, Tensor], keep: bool) -> Arriving:
        if self.heads is None:
            return Arriving(lambda: list(tensors))
        queries, keys = _spans(plans[index])
        sides = zip(tensors, (self.queries, self.keys, self.keys), (queries, keys, keys), strict=True)
        return self.heads.there(list(sides), keep=keep)

    def _there_gradients(self, plans: Plans, index: int, grads: tuple[Tensor, Tensor | None]) -> Arriving:
        tensors = [grads[0]] if grads[1] is None else [grads[0], grads[1].transpose(0, 1).unsqueeze(-1)]
        heads = self.heads
        if heads is None:
            return Arriving(lambda: tensors)
        queries, _ = _spans(plans[index])
        return heads.there([(tensor, self.queries, queries) for tensor in tensors], keep=False)

    def _back_states(self, shares: Sequence[HeadShare], turn: Turn, results: list[Tensor], with_lse: bool) -> Arriving:
        tensors = [turn.output, turn.lse.transpose(0, 1).unsqueeze(-1)] if with_lse else [turn.output]
        if self.heads is None:
            return Arriving(lambda: tensors)
        queries, _ = _spans(shares)
        return self.heads.back([(tensor, self.queries, queries) for tensor in tensors], results, add=False)

    def _back_gradients(
        self, shares: Sequence[HeadShare], found: tuple[Tensor, Tensor, Tensor], totals: list[Tensor]
    ) -> Arriving:
        if self.heads is None:
            return Arriving(lambda: list(found))
        queries, keys = _spans(shares)
        tensors = [tensor.to(total.dtype) for tensor, total in zip(found, totals, strict=True)]
        rows = (self.queries, self.keys, self.keys)
        return self.heads.back(list(zip(tensors, rows, (queries, keys, keys), strict=True)), totals, add=True)


def _spans(shares: Sequence[HeadShare]) -> tuple[list[Span], list[Span]]:
    return [share.queries for share in shares], [share.keys for share in shares]


def _sum_of(tensor: Tensor, parts: int, replicated: RowSet | None = None) -> GradientSum:
    """Of at most `parts` gradients a row, and of more where ranks add up theirs of replicated rows."""
    few = parts <= 2 and (replicated is None or not replicated.count)
    return GradientSum(tensor, tensor.dtype if few else torch.float32)


def _read(keys: Tensor, share: HeadShare) -> Tensor:
    """The key heads that the kernel reads: a head for each query head where it could not find them by itself."""
    # By host numbers: an index tensor would have to be copied to the device, which waits for it.
    return keys if share.repeat is None else torch.stack([keys[:, head] for head in share.repeat], 1)


def _written(gradient: Tensor, share: HeadShare, kv_heads: int) -> Tensor:
    """The gradient of `_read`."""
    if share.repeat is None:
        return gradient
    total = gradient.new_zeros(gradient.shape[0], kv_heads, gradient.shape[2], dtype=torch.float32)
    for place, head in enumerate(share.repeat):
        total[:, head] += gradient[:, place]
    return total


class PlanAttention(torch.autograd.Function):
    """`Engine.forward` and `Engine.backward` as one differentiable function."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        engine: Engine,
        kernel: LocalKernel,
        settings: Settings,
        with_lse: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        output, lse, turns = engine.forward(kernel, settings, (query, key, value), sinks, with_lse, keep=True)
        saved: list[Any] = [tensor for turn in turns for tensor in turn[1:]]
        ctx.save_for_backward(sinks, *saved)  # type: ignore[arg-type]
        ctx.made_by = (engine, kernel, settings, [turn.share for turn in turns])  # type: ignore[attr-defined]
        ctx.like = (query.dtype, query.shape[1], key.shape[1])  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        engine, kernel, settings, shares = ctx.made_by
        sinks, *saved = ctx.saved_tensors
        dtype, heads, kv_heads = ctx.like
        turns = [Turn(share, *saved[5 * index : 5 * index + 5]) for index, share in enumerate(shares)]
        if grad_output is None:
            value_dim = turns[0].output.shape[2]
            grad_output = torch.zeros(engine.queries.total, heads, value_dim, dtype=dtype, device=turns[0].query.device)
        grads = (grad_output, grad_lse)
        found = engine.backward(kernel, settings, turns, sinks, grads, (heads, kv_heads))
        given = [gradient.to(dtype) for gradient in found[:3]]
        sink_grad = None if found[3] is None else found[3].to(sinks.dtype)
        return (None, None, None, None, *given, sink_grad)
