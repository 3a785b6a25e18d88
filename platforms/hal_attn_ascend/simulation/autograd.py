"""The gradient of `npu_fusion_attention`: by `npu_fusion_attention_grad`, from what the forward pass returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Arguments that the two operators call by the same name.
SHARED = {"keep_prob", "pre_tockens", "next_tockens", "inner_precise", "prefix"}
SHARED |= {"actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync", "softmax_layout"}


def fusion_with_gradients(namespace: Any, bind: Callable[..., Mapping[str, Any]]) -> Callable[..., Any]:
    """The autograd kernel over the operators of `namespace`; `bind` names the arguments of a call, with defaults."""

    def kernel(*arguments: object, **options: object) -> Any:
        given = bind(*arguments, **options)
        return _Fusion.apply(  # type: ignore[no-untyped-call]
            given["query"], given["key"], given["value"], given.get("sink"), namespace, given
        )

    return kernel


class _Fusion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        namespace: Any,
        given: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            results: tuple[Any, ...] = namespace.npu_fusion_attention(**given)
        output, softmax_max, softmax_sum, softmax_in, seed, offset, numels = results
        tensors = (query, key, value, sink, output, softmax_max, softmax_sum, softmax_in)
        ctx.save_for_backward(*tensors, given["pse"], given["atten_mask"])  # type: ignore[arg-type]
        ctx.mark_non_differentiable(softmax_max, softmax_sum, softmax_in)
        plain = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        ctx.more = (namespace, plain, {"seed": seed, "offset": offset, "numels": numels})  # type: ignore[attr-defined]
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        query, key, value, sink, output, softmax_max, softmax_sum, softmax_in, pse, atten_mask = saved
        namespace, given, dropout = ctx.more  # type: ignore[attr-defined]
        options = {name: value for name, value in given.items() if name in SHARED}
        if sink is not None:
            options["sink"] = sink
        found = namespace.npu_fusion_attention_grad(
            query,
            key,
            value,
            dy.contiguous(),
            given["head_num"],
            given["input_layout"],
            pse=pse,
            atten_mask=atten_mask,
            softmax_max=softmax_max,
            softmax_sum=softmax_sum,
            softmax_in=softmax_in,
            attention_in=output,
            scale_value=given["scale"],
            **dropout,
            **options,
        )
        return (*found[:3], None if sink is None else found[4], None, None)
