"""What a rank sends to others for one attention of a plan, and the least that its way of sharing could send.

Counted from the plan on the host; nothing is communicated. Three kinds of traffic, each with its own least:

| kind     | sent                                              | least                                                 |
|----------|---------------------------------------------------|-------------------------------------------------------|
| heads    | rows of all heads to where their heads are, and   | the same without room for alignment; gradients of q,  |
|          | output back                                       | k, v in their own dtype                               |
| keys     | a ring: every buffer that passes through here;    | each own row of K and V once to each rank that sees   |
|          | a gather: own rows to each rank that sees them    | it; backward again, and its gradient back             |
| states   | states of replicated queries to all, and their    | a sum over n ranks, 2 (n - 1) / n of its size sent    |
|          | gradients                                         | by each                                               |

In a ring a rank also sends on what others hold, so its own figure may be under its least; sums over ranks compare.
A collective counts as what leaves the rank: an all-gather n - 1 times the tensor, an all-reduce 2 (n - 1) / n times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hal_attn.sequence_parallel.exchange import GatherExchange, RingExchange
from hal_attn.sequence_parallel.heads import HeadShare, HeadSplit
from hal_attn.sequence_parallel.plan import Plan
from hal_attn.sequence_parallel.ulysses import SideRows, padded_size

_FLOAT32 = 4


@dataclass(frozen=True)
class Share:
    """Bytes of one kind of traffic: "heads", "keys" or "states"."""

    kind: str
    sent: int
    least: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends for one attention, by kind; kinds that a plan does not have are left out."""

    by_kind: tuple[Share, ...]

    @property
    def sent(self) -> int:
        """All bytes that this rank sends."""
        return sum(share.sent for share in self.by_kind)

    @property
    def least(self) -> int:
        """The least that these ways of sharing could send."""
        return sum(share.least for share in self.by_kind)


@dataclass(frozen=True)
class Sizes:
    """The tensors of an attention: heads, head dims and bytes of an element; and whether gradients are wanted."""

    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    itemsize: int
    backward: bool

    @property
    def key_row(self) -> int:
        """Numbers of one key and value head of one token."""
        return self.head_dim + self.value_head_dim


def traffic(
    plan: Plan,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    itemsize: int,
    *,
    backward: bool = False,
) -> Traffic:
    """What this rank sends for one `plan.attention`, and with `backward` for its gradients as well (without sinks, and
    no LSE asked for)."""
    sizes = Sizes(heads, kv_heads, head_dim, value_head_dim, itemsize, backward)
    split = HeadSplit(heads, kv_heads, plan.groups.ulysses)
    turns = plan.engine.turns(split)
    found = []
    if plan.groups.ulysses > 1:
        found.append(_of_heads(plan, turns, sizes, _FLOAT32 if split.shared else itemsize))
    if plan.groups.exchange_degree > 1:
        shares = [turn[plan.groups.ulysses_rank] for turn in turns]
        found.append(_of_keys(plan, shares, sizes))
        if plan.engine.replicated_q.count or (backward and plan.engine.replicated_k.count):
            found.append(_of_states(plan, shares, sizes))
    return Traffic(tuple(found))


# Heads


def _of_heads(plan: Plan, turns: Sequence[Sequence[HeadShare]], sizes: Sizes, of_gradient: int) -> Share:
    blocks = [block for turn in turns for block in _head_blocks(plan, turn, sizes, of_gradient)]
    return Share("heads", sum(padded_size(sent) for sent, _ in blocks), sum(least for _, least in blocks))


def _head_blocks(plan: Plan, turn: Sequence[HeadShare], sizes: Sizes, of_gradient: int) -> Iterator[tuple[int, int]]:
    """(bytes, least) of each tensor that goes to another rank in one turn of heads."""
    own, engine = plan.groups.ulysses_rank, plan.engine
    rows_q, rows_k = engine.queries.own.count, engine.keys.own.count
    for rank, share in enumerate(turn):
        if rank == own:
            continue
        key_row = share.keys.length * sizes.itemsize * rows_k
        there = [share.queries.length * sizes.head_dim * sizes.itemsize * rows_q]
        there += [key_row * sizes.head_dim, key_row * sizes.value_head_dim]
        yield from ((size, size) for size in there)
        results, keys = _held(engine.queries, rank), _held(engine.keys, rank)
        queries, kept = turn[own].queries.length, turn[own].keys.length
        output = results * queries * sizes.value_head_dim * sizes.itemsize
        yield output, output
        if sizes.backward:
            given = rows_q * share.queries.length * sizes.value_head_dim * sizes.itemsize
            yield given, given
            numbers = [results * queries * sizes.head_dim, keys * kept * sizes.head_dim]
            numbers.append(keys * kept * sizes.value_head_dim)
            yield from ((count * of_gradient, count * sizes.itemsize) for count in numbers)


def _held(rows: SideRows, rank: int) -> int:
    return rows.of_rank[rank].count


# Keys


def _of_keys(plan: Plan, shares: Sequence[HeadShare], sizes: Sizes) -> Share:
    here, ranks = plan.groups.exchange_rank, range(plan.groups.exchange_degree)
    needed = plan.schedule.needed
    to_others = sum(needed(rank, here).count for rank in ranks if rank != here)
    from_others = sum(needed(here, rank).count for rank in ranks if rank != here)
    forward, gradients = _travelling(plan)
    of_gradient = sizes.itemsize if plan.engine.exchange.straight else _FLOAT32
    numbers = sizes.key_row * sum(share.keys.length for share in shares)
    sent, least = forward * sizes.itemsize, to_others * sizes.itemsize
    if sizes.backward:
        sent = 2 * sent + gradients * of_gradient
        least = 2 * least + from_others * sizes.itemsize
    return Share("keys", sent * numbers, least * numbers)


def _travelling(plan: Plan) -> tuple[int, int]:
    """Rows of keys, and rows of their gradients, that leave this rank."""
    exchange = plan.engine.exchange
    if isinstance(exchange, GatherExchange):
        return sum(rows.count for rows in exchange.sends), sum(exchange.receives)
    if not isinstance(exchange, RingExchange):
        return 0, 0
    held = [exchange.rows[exchange.source(index)] for index in range(len(exchange.hops))]
    # From hop 1 the gradient of what is held goes on with it, and from the last hop home.
    return sum(held[:-1]), sum(held[1:])


# States


def _of_states(plan: Plan, shares: Sequence[HeadShare], sizes: Sizes) -> Share:
    ranks, engine = plan.groups.exchange_degree, plan.engine
    heads = sum(share.queries.length for share in shares)
    states = engine.replicated_q.count * heads * (sizes.value_head_dim + 1) * _FLOAT32
    sent, least = states * (ranks - 1), _summed(states, ranks)
    if sizes.backward:
        keys = engine.replicated_k.count * sum(share.keys.length for share in shares) * sizes.key_row
        gradients = (engine.replicated_q.count * heads * sizes.head_dim + keys) * _FLOAT32
        sent, least = sent + _summed(gradients, ranks), least + _summed(gradients, ranks)
    return Share("states", sent, least)


def _summed(size: int, ranks: int) -> int:
    return 2 * (ranks - 1) * size // ranks
