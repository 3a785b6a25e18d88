"""A whole tensor from every rank's rows, on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hal_attn.sequence_parallel.groups import SequenceParallelGroups
from hal_attn.sequence_parallel.sharding import Rows, Sharding


def gather_rows(groups: SequenceParallelGroups, sharding: Sharding, rows: Rows, local: Tensor, total: int) -> Tensor:
    """Rows `[T, ...]` of each rank -> all `total` tokens, replicated ones once."""
    whole: Tensor = _Gather.apply(groups, sharding, rows, local, total)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, groups: SequenceParallelGroups, sharding: Sharding, rows: Rows, local: Tensor, total: int
    ) -> Tensor:
        ctx.tokens = rows.tokens.to(local.device)
        whole = local.new_empty(total, *local.shape[1:])
        whole[ctx.tokens] = local
        if groups.everyone is None:
            return whole
        held = [sharding.local(*divmod(rank, groups.ulysses)) for rank in range(groups.size)]
        owned = [part.tokens[part.own] for part in held]
        most = max(tokens.numel() for tokens in owned)
        own = local[rows.own.to(local.device)]
        padded = torch.cat([own, own.new_zeros(most - own.shape[0], *own.shape[1:])]).contiguous()
        parts = [torch.empty_like(padded) for _ in range(groups.size)]
        flat = [part.view(-1).view(torch.uint8) for part in parts]
        dist.all_gather(flat, padded.view(-1).view(torch.uint8), group=groups.everyone)
        for index, rank in enumerate(groups.ranks):
            part = parts[dist.get_group_rank(groups.everyone, rank)]
            whole[owned[index].to(local.device)] = part[: owned[index].numel()]
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, None, gradient[ctx.tokens], None
