"""A plan in words: who holds what, what travels, and who computes how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal_attn.sequence_parallel.plan import Plan


def report(plan: Plan) -> str:
    return f"{plan.groups.mode}"
