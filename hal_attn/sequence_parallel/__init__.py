"""Attention over sequences that several ranks share: Ulysses, KV gather, ring, and Ulysses with either."""

from hal_attn.sequence_parallel.groups import SequenceParallelGroups
from hal_attn.sequence_parallel.modules import (
    KVGatherAttention,
    LocalAttention,
    PlannedAttention,
    RingAttention,
    UlyssesAttention,
    USPAttention,
)
from hal_attn.sequence_parallel.plan import Plan

__all__ = [
    "KVGatherAttention",
    "LocalAttention",
    "Plan",
    "PlannedAttention",
    "RingAttention",
    "SequenceParallelGroups",
    "USPAttention",
    "UlyssesAttention",
]
