"""`plan.attention` as an operator, for a program that is compiled: what travels, travels when the program runs.

Every rank must run the same program, as it must make the same calls without a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal_attn.backend import AttentionResult
from hal_attn.carrier import carried_by
from hal_attn.compiled import refused, wanted
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.kinds import DENSE, PACKED, fault_of_call
from hal_attn.operators import Operator

if TYPE_CHECKING:
    from hal_attn.sequence_parallel.plan import Plan


_PLAIN = ("scale", "softcap", "deterministic", "return_lse", "backend")


def plan_attention(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    plain: tuple[Any, ...],
) -> AttentionResult:
    """`plan.attention` while a program is traced; `given`: sinks, mask, key_padding_mask; `plain`: `_PLAIN`."""
    sinks, mask, key_padding_mask = given
    options = dict(zip(_PLAIN, plain, strict=True))
    layouts = PACKED if plan.description.batch is None else DENSE
    tensors = {"mask": mask, "key_padding_mask": key_padding_mask, "sinks": sinks}
    fault = fault_of_call((query, key, value), layouts, {**options, **tensors})
    if fault is not None:
        return refused(query, value, options, fault)
    *numbers, backend = plain
    names = [backend] if isinstance(backend, str) else backend
    wanting = (query, key, value, sinks)
    result = torch.ops.hal_attn.plan_attention(
        *wanting, plan.carrier, mask, key_padding_mask, *numbers, names, wanted(wanting)
    )
    return (result[0], result[1]) if options["return_lse"] else result[0]


def _plan_attention(*, plan: Tensor, backend: Sequence[str] | None, **options: Any) -> AttentionResult:
    known: Any = carried_by(plan)
    if known is None:
        raise InvalidAttentionInputError("plan", "one that is gone", "a plan that is kept until the backward pass")
    result: AttentionResult = known.attention(**options, backend=None if backend is None else tuple(backend))
    return result


PLAN_ATTENTION = Operator(
    "plan_attention",
    ("query", "key", "value", "sinks"),
    "Tensor plan, Tensor? mask, Tensor? key_padding_mask, float? scale, float softcap, bool deterministic, "
    "bool return_lse, str[]? backend",
    _plan_attention,
)
PLAN_ATTENTION.define()
