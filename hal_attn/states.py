"""Merging partial attention results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hal_attn.errors import InvalidAttentionInputError
from hal_attn.kinds import Fault


def merge_attention_states(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from the results over parts of them.

    Args:
        outputs: of each part, `[B, S, H, Dv]` or `[T, H, Dv]`.
        lses: of each part, `[B, H, S]` or `[H, T]`, natural log.

    Returns:
        The output in the dtype of the first part and the LSE in float32 (float64 parts stay float64). It is computed in
        at least float32, over all parts at once in the order given, so how the keys were cut does not matter beyond
        rounding. A part with LSE -inf has no weight, whatever its output holds, NaN included; where every part has -inf
        the output is 0 and the LSE -inf. Differentiable in outputs and LSEs.

    Raises:
        InvalidAttentionInputError: no parts, or parts whose shapes do not fit together.
    """
    outputs, lses = list(outputs), list(lses)
    fault = _fault(outputs, lses)
    if fault is not None:
        if is_compiling():
            refused: tuple[Tensor, Tensor] = torch.ops.hal_attn.refuse(None, None, True, *fault)
            return refused
        raise InvalidAttentionInputError(*fault)
    exact = torch.promote_types(outputs[0].dtype, torch.float32)
    if lses[0].dtype == torch.float64:
        exact = torch.float64
    stacked = torch.stack([lse.to(exact) for lse in lses])
    top = stacked.amax(0).detach()
    top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    weights = torch.exp(stacked - top)
    total = weights.sum(0)
    seen = total > 0
    safe = torch.where(seen, total, torch.ones_like(total))
    lse = torch.where(seen, torch.log(safe) + top, torch.full_like(total, -torch.inf))
    merged = torch.zeros_like(outputs[0], dtype=exact)
    for output, part, weight in zip(outputs, stacked, weights, strict=True):
        share = (weight / safe).transpose(-1, -2).unsqueeze(-1)
        empty = torch.isneginf(part).transpose(-1, -2).unsqueeze(-1)
        merged = merged + output.to(exact).masked_fill(empty, 0.0) * share
    return merged.to(outputs[0].dtype), lse if exact == torch.float64 else lse.to(torch.float32)


def _fault(outputs: list[Tensor], lses: list[Tensor]) -> Fault | None:
    """What is wrong with the parts: nothing raises here, because a tracer cannot follow an error of ours."""
    if not outputs:
        return ("outputs", "no parts", "at least one partial result", "")
    if len(outputs) != len(lses):
        return ("lses", f"{len(lses)} parts", f"as many as outputs, {len(outputs)}", "")
    for name, parts in (("outputs", outputs), ("lses", lses)):
        for index, part in enumerate(parts):
            if not isinstance(part, Tensor):
                return (f"{name}[{index}]", f"a {type(part).__name__}", "a torch.Tensor", "")
    shape = outputs[0].shape
    if outputs[0].dim() not in (3, 4):
        return ("outputs", f"shape {tuple(shape)}", "[B, S, H, Dv] or [T, H, Dv]", "")
    expected = (*shape[:-3], shape[-2], shape[-3])
    for index, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.shape != shape:
            return (f"outputs[{index}]", f"shape {tuple(output.shape)}", f"the first part's, {tuple(shape)}", "")
        if tuple(lse.shape) != expected:
            return (f"lses[{index}]", f"shape {tuple(lse.shape)}", f"{expected}", "")
        if not lse.is_floating_point() or lse.dtype in (torch.float16, torch.bfloat16):
            return (f"lses[{index}]", f"dtype {lse.dtype}", "float32 or float64", "")
    return None
