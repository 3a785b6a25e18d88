"""A plan: one batch shape over the ranks of its groups, made once from host lengths, run by every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from hal_attn.backend import AttentionResult
from hal_attn.carrier import refer
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.portable.operators import wants_gradient
from hal_attn.sequence_parallel.agreement import agreed
from hal_attn.sequence_parallel.compiled import plan_attention
from hal_attn.sequence_parallel.costs import Costs, best_for_all
from hal_attn.sequence_parallel.description import Description, describe
from hal_attn.sequence_parallel.engine import Engine, PlanAttention
from hal_attn.sequence_parallel.exchange import Exchange, GatherExchange, NoExchange, RingExchange
from hal_attn.sequence_parallel.gathering import gather_rows
from hal_attn.sequence_parallel.groups import SequenceParallelGroups
from hal_attn.sequence_parallel.inputs import Inputs
from hal_attn.sequence_parallel.kernel import LocalKernel, MaskedKernel, PackedKernel, Settings
from hal_attn.sequence_parallel.masks import masks_without_values, whole_masks
from hal_attn.sequence_parallel.schedule import Schedule
from hal_attn.sequence_parallel.sharding import Rows, Sharding
from hal_attn.sequence_parallel.ulysses import HeadExchange, SideRows
from hal_attn.sequence_parallel.whole import Placement, placed
from hal_attn.sequence_parallel.work import RowSet

# Kinds of call that a plan remembers; a model has a few.
_KINDS = 256


@dataclass(frozen=True, eq=False)
class Plan:
    """Who holds what, what travels when, and the calls of this rank. Made by `SequenceParallelGroups.plan`.

    Tensors of a packed plan are `[T, H, D]`, of a dense one `[B, S, H, D]`; T and S are this rank's, T or B * S rows in
    the order of `shard`.
    """

    groups: SequenceParallelGroups
    description: Description
    expected: Mapping[str, object]
    _agreed: dict[object, str | Sequence[str] | None] = field(default_factory=dict, repr=False)
    _known: dict[object, Settings] = field(default_factory=dict, repr=False)

    @cached_property
    def carrier(self) -> Tensor:
        """What stands for this plan in a compiled program; it does not keep the plan alive."""
        return refer(self)

    # Who holds what

    @cached_property
    def schedule(self) -> Schedule:
        """What every rank needs, sends and computes."""
        about, groups = self.description, self.groups
        degree = groups.exchange_degree
        placement = Placement((None,) * len(about.lengths), {})
        if about.whole:
            placement = placed(about.own_tokens, degree, about.window_size, about.zigzag)
        shape = (placement, degree, groups.ulysses, about.zigzag, about.batch is not None, about.whole)
        queries = Sharding(about.lengths, about.prefix, about.suffix, *shape)
        keys = Sharding(about.lengths_k, about.key_ends, about.suffix, *shape)
        return Schedule(about, queries, keys, groups.kv_gather > 1)

    @cached_property
    def rows(self) -> Rows:
        """This rank's query rows."""
        return self.schedule.queries.local(self.groups.exchange_rank, self.groups.ulysses_rank)

    @cached_property
    def rows_kv(self) -> Rows:
        """This rank's key rows."""
        return self.schedule.keys.local(self.groups.exchange_rank, self.groups.ulysses_rank)

    @cached_property
    def positions(self) -> Tensor:
        """The place of each local query token in its sequence, int64: `[T]`, or `[S]` of a dense plan."""
        return self._of_one(self.rows, self.rows.positions)

    @cached_property
    def positions_kv(self) -> Tensor:
        """The place of each local key token among its sequence's keys, int64: `[T]`, or `[S]` of a dense plan."""
        return self._of_one(self.rows_kv, self.rows_kv.positions)

    def shard(self, tensor: Tensor) -> Tensor:
        """This rank's query rows of a whole tensor `[T, ...]`, or `[B, S, ...]` of a dense plan."""
        return self._shard(tensor, self.rows, self.description.lengths, "query")

    def shard_kv(self, tensor: Tensor) -> Tensor:
        """This rank's key rows of a whole tensor."""
        return self._shard(tensor, self.rows_kv, self.description.lengths_k, "key")

    def gather(self, local: Tensor) -> Tensor:
        """The inverse of `shard`: the whole tensor on every rank, replicated rows once. Differentiable: a rank's rows
        get the gradient that they have in this rank's whole tensor."""
        return self._gather(local, self.schedule.queries, self.rows, self.description.lengths)

    # Attention

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        backend: str | Sequence[str] | None = None,
    ) -> AttentionResult:
        """Attention over the whole sequences, for this rank's queries: `[T, H, Dv]` and, with `return_lse`, LSE
        `[H, T]`; dense `[B, S, H, Dv]` and `[B, H, S]`.

        Every rank calls it alike. Masks are those of a dense plan, whole or sharded as the plan says. Gradients equal
        those of one process; what stands for a replicated token, or for the sinks, is the same on every rank and counts
        once.

        Raises:
            InvalidAttentionInputError: a tensor or option is wrong, here or on another rank, or differs between ranks.
            UnsupportedAttentionError: no backend takes the calls of this rank.
        """
        if is_compiling():
            plain = (scale, softcap, deterministic, return_lse, backend)
            return plan_attention(self, query, key, value, (sinks, mask, key_padding_mask), plain)
        given = Inputs(
            query, key, value, scale, mask, key_padding_mask, softcap, sinks, deterministic, return_lse, backend
        )
        tensors, settings = self._settled(given)
        kernel = self._kernel(*whole_masks(self, mask, key_padding_mask))
        if wants_gradient(*tensors, sinks):
            output, lse = PlanAttention.apply(self.engine, kernel, settings, return_lse, *tensors, sinks)  # type: ignore[no-untyped-call]
        else:
            output, lse, _ = self.engine.forward(kernel, settings, tensors, sinks, return_lse, keep=False)
        if self.description.batch is not None:
            output = output.view(*query.shape[:-1], value.shape[-1])
            lse = None if lse is None else lse.unflatten(1, query.shape[:2]).transpose(0, 1)
        return output if lse is None else (output, lse)

    @property
    def backends(self) -> tuple[str, ...]:
        """What the group agreed on for the calls made so far, by name; those that each call chooses are left out."""
        names = (
            name for found in self._agreed.values() for name in ([found] if isinstance(found, str) else found or ())
        )
        return tuple(dict.fromkeys(names))

    @cached_property
    def engine(self) -> Engine:
        """What this rank does for every attention of the plan."""
        groups, schedule = self.groups, self.schedule
        rank, chunk_q = groups.exchange_rank, schedule.chunks_q[groups.exchange_rank]
        heads = groups.exchanging_heads
        return Engine(
            None if heads is None else HeadExchange(heads, groups.ulysses_rank, groups.peers_of_heads),
            self._side(schedule.queries, chunk_q),
            self._side(schedule.keys, schedule.chunks_k[rank]),
            groups.ulysses,
            self._exchange(),
            groups.exchanging,
            rank == 0,
            RowSet.of_index(chunk_q.replicated, chunk_q.count),
            RowSet.of_index(schedule.chunks_k[rank].replicated, schedule.chunks_k[rank].count),
            chunk_q.count,
            groups.everyone,
        )

    def __str__(self) -> str:
        from hal_attn.sequence_parallel.report import report

        return report(self)

    # Within

    def _side(self, sharding: Sharding, chunk: Rows) -> SideRows:
        groups = self.groups
        locals_ = [sharding.local(groups.exchange_rank, rank) for rank in range(groups.ulysses)]
        return SideRows.of(locals_, chunk, groups.ulysses_rank)

    def _exchange(self) -> Exchange:
        groups, schedule = self.groups, self.schedule
        if groups.exchanging is None:
            return NoExchange()
        rank = groups.exchange_rank
        if groups.kv_gather > 1:
            seen = tuple(schedule.receives(reader) for reader in range(groups.kv_gather))
            if not any(map(any, seen)):
                return NoExchange()
            return GatherExchange(groups.exchanging, rank, schedule.sends(rank), seen, groups.peers)
        counts = tuple(rows.count for rows in schedule.travelling)
        return RingExchange(
            groups.exchanging, rank, schedule.hops, counts, schedule.travelling_rows(rank), groups.peers
        )

    @cached_property
    def _packed_kernel(self) -> PackedKernel:
        return PackedKernel(self.schedule.calls(self.groups.exchange_rank))

    def _kernel(self, mask: Tensor | None, key_padding_mask: Tensor | None) -> LocalKernel:
        if mask is None and key_padding_mask is None:
            return self._packed_kernel
        assert self.description.batch is not None
        return MaskedKernel(self._masked_hops, self.description.batch, mask, key_padding_mask)

    @cached_property
    def _masked_hops(self) -> tuple[Any, ...]:
        return self.schedule.masked_hops(self.groups.exchange_rank)

    def _settled(self, given: Inputs) -> tuple[tuple[Tensor, Tensor, Tensor], Settings]:
        """Query, key and value `[T, H, D]` and the settings; checked, and agreed on, once for each kind of call."""
        identity = given.identity
        known = None if identity is None else self._known.get(identity)
        if known is not None:
            tensors = (given.query, given.key, given.value)
            if self.description.batch is not None:
                tensors = (given.query.flatten(0, 1), given.key.flatten(0, 1), given.value.flatten(0, 1))
            return tensors, known
        settings = given.settings(self._backend(given))
        tensors = given.checked(self)
        if identity is not None:
            if len(self._known) >= _KINDS:
                self._known.clear()
            self._known[identity] = settings
        return tensors, settings

    def _backend(self, given: Inputs) -> str | Sequence[str] | None:
        """The backend of the whole group for calls like this one; the first such call compares them on all ranks."""
        told = given.told(self)
        key = tuple(told.items())
        if key in self._agreed:
            return self._agreed[key]

        def able() -> Costs | None:
            tensors = given.checked(self)
            masks = masks_without_values(self, given.mask, given.key_padding_mask)
            return self._kernel(*masks).backends(*self._heads_here(tensors), given.settings(given.backend))

        _, found = agreed(self.groups.everyone, able, lambda costs: {**told, "_costs": costs})
        costs: list[Any] = [each for about in found if (each := about["_costs"]) is not None]
        # Without one that takes all calls, each call chooses its own; every rank has seen that there is one.
        self._agreed[key] = best_for_all(costs) or given.backend
        return self._agreed[key]

    def _heads_here(self, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The shapes that this rank's kernels will see, without memory."""
        from hal_attn.sequence_parallel.heads import HeadSplit

        split = HeadSplit(tensors[0].shape[1], tensors[1].shape[1], self.groups.ulysses)
        share = split.shares[self.groups.ulysses_rank]
        keys = share.keys.length if share.repeat is None else len(share.repeat)
        query, key, value = (
            tensor.new_empty(1).expand(1, max(1, heads), tensor.shape[2])
            for tensor, heads in zip(tensors, (share.queries.length, keys, keys), strict=True)
        )
        return query, key, value

    def _of_one(self, rows: Rows, values: Tensor) -> Tensor:
        """Of a dense plan, what all its sequences have alike."""
        batch = self.description.batch
        return values if batch is None else values[: rows.count // max(1, batch)]

    def _shard(self, tensor: Tensor, rows: Rows, lengths: tuple[int, ...], name: str) -> Tensor:
        batch = self.description.batch
        whole = tensor if batch is None else tensor.flatten(0, 1)
        dense = batch is not None and (tensor.shape[0] != batch or (batch and tensor.shape[1] != lengths[0]))
        if whole.shape[0] != sum(lengths) or dense:
            need = f"{sum(lengths)} tokens" if batch is None else f"[{batch}, {lengths[0] if lengths else 0}, ...]"
            raise InvalidAttentionInputError(name, f"a whole tensor of shape {tuple(tensor.shape)}", need)
        found = RowSet.of_index(rows.tokens, whole.shape[0]).take(whole)
        return found if batch is None else found.unflatten(0, (batch, -1))

    def _gather(self, local: Tensor, sharding: Sharding, rows: Rows, lengths: tuple[int, ...]) -> Tensor:
        batch = self.description.batch
        flat = local if batch is None else local.flatten(0, 1)
        if flat.shape[0] != rows.count:
            raise InvalidAttentionInputError("local", f"{flat.shape[0]} rows", f"this rank's {rows.count}")
        whole = gather_rows(self.groups, sharding, rows, flat, sum(lengths))
        return whole if batch is None else whole.unflatten(0, (batch, -1))


def make_plan(
    groups: SequenceParallelGroups,
    lengths: dict[str, Any],
    options: dict[str, Any],
    expected: dict[str, object],
) -> Plan:
    """The plan, once all ranks of the groups agree on what it is for."""

    def make() -> Plan:
        description = describe(**lengths, coordinates=groups.exchange_degree, **options)
        return Plan(groups, description, expected)

    def told(plan: Plan) -> Mapping[str, object]:
        about = plan.description
        return {
            "lengths": about.lengths,
            "lengths_k": about.lengths_k,
            "batch": about.batch,
            "causal and window_size": about.window_size,
            "layout": ("zigzag" if about.zigzag else "contiguous") + (", some whole" if about.whole else ""),
            "replicated_prefix": about.prefix,
            "replicated_suffix": about.suffix,
            "key_prefix": about.key_prefix,
            "masks": about.masks,
            "degrees": (groups.ulysses, groups.ring, groups.kv_gather),
            **{name: str(value) for name, value in expected.items()},
        }

    made = agreed(groups.everyone, make, told)[0]
    # Made now: a tracer could not.
    _ = made.carrier
    return made
