"""A plan in words: what travels and why so, who holds what, how much each computes, and the bytes of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hal_attn.sequence_parallel.description import Description

if TYPE_CHECKING:
    from hal_attn.sequence_parallel.plan import Plan

_MOST = 6


def report(plan: Plan) -> str:
    """The text of `str(plan)`. Counts the work of every rank, on the host."""
    return "\n".join([*_head(plan), "", *_ranks(plan), "", *_traffic(plan)])


def _head(plan: Plan) -> Iterator[str]:
    groups, about = plan.groups, plan.description
    degrees = ", ".join(
        f"{name}={getattr(groups, name)}" for name in ("ulysses", "ring", "kv_gather") if getattr(groups, name) > 1
    )
    ranks = f"{groups.size} ranks ({degrees}), this is rank {groups.rank}" if degrees else "one rank"
    yield f"mode        {groups.mode}, {ranks}"
    yield f"sequences   {_batch(about)}"
    left, right = about.window_size
    limits = [f"at most {left} keys back"] * (left >= 0) + [f"at most {right} keys ahead"] * (right > 0)
    band = ["causal"] * (right == 0) + limits
    yield f"visible     {', '.join(band) or 'every key'}"
    yield f"layout      {'zigzag' if about.zigzag else 'contiguous'}: {about.why}"
    placement = plan.schedule.queries.placement
    whole = sum(owner is not None for owner in placement.owners)
    if whole:
        how = "each has about as much"
        if placement.uneven:
            how = f"the cut of {' and '.join(map(str, placement.uneven))} evens out what each has"
        yield f"whole       {whole} of the sequences, each on one coordinate: {how}"
    replicated = {"prefix": about.prefix, "suffix": about.suffix, "key prefix": about.key_prefix}
    told = [f"{name} {_numbers(values)}" for name, values in replicated.items() if any(values)]
    if told:
        yield f"replicated  {'; '.join(told)}"
    if groups.ring > 1:
        hops = ", ".join(str(hop) for hop in plan.schedule.hops)
        yield f"hops        {hops} of 0 to {groups.ring - 1}; a hop at which no rank sees a key is left out"


def _batch(about: Description) -> str:
    if about.batch is not None:
        length, length_k = (lengths[0] if lengths else 0 for lengths in (about.lengths, about.lengths_k))
        return f"{about.batch} of {length} queries and {length_k} keys, dense"
    queries, keys = _numbers(about.lengths), _numbers(about.lengths_k)
    alike = "" if about.lengths == about.lengths_k else f", keys {keys}"
    return f"{len(about.lengths)} packed, of {queries}{alike}"


def _ranks(plan: Plan) -> Iterator[str]:
    """A line for each rank: rows that it holds, and its part of all scores."""
    groups, schedule = plan.groups, plan.schedule
    scores = [sum(call.scores for hop in schedule.calls(rank) for call in hop) for rank in range(schedule.ranks)]
    total = sum(scores) * groups.ulysses or 1
    yield "rank  exchange  heads  query rows   key rows  part of the work"
    for rank in range(groups.size):
        exchange, heads = divmod(rank, groups.ulysses)
        rows = schedule.queries.local(exchange, heads).count, schedule.keys.local(exchange, heads).count
        here = "  <- here" if rank == groups.rank and groups.size > 1 else ""
        part = f"{scores[exchange] / total:.1%}"
        yield f"{rank:>4}  {exchange:>8}  {heads:>5}  {rows[0]:>10}  {rows[1]:>9}  {part:>16}{here}"


def _traffic(plan: Plan) -> Iterator[str]:
    from hal_attn.sequence_parallel.traffic import traffic

    known = plan.expected
    heads, dtype = known["num_heads"], known["dtype"]
    dim = known["head_dim"]
    if not isinstance(heads, int) or not isinstance(dim, int) or not isinstance(dtype, torch.dtype):
        yield "bytes       not known: give the plan num_heads, head_dim and dtype"
        return
    kv_heads, value_dim = known["num_kv_heads"], known["value_head_dim"]
    shape = (kv_heads if isinstance(kv_heads, int) else heads, dim, value_dim if isinstance(value_dim, int) else dim)
    for name, backward in (("forward", False), ("and backward", True)):
        found = traffic(plan, heads, *shape, dtype.itemsize, backward=backward)
        kinds = ", ".join(f"{share.kind} {_bytes(share.sent)}" for share in found.by_kind)
        yield f"bytes       {name}: this rank sends {_bytes(found.sent)} a layer{f' ({kinds})' if kinds else ''}"


def _numbers(values: tuple[int, ...]) -> str:
    if len(set(values)) == 1:
        return str(values[0])
    shown = [str(value) for value in values[:_MOST]]
    return " + ".join(shown) + (f" + ... ({sum(values)} in all)" if len(values) > _MOST else "")


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
