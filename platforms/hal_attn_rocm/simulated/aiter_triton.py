"""The functions of aiter.ops.triton.mha, amd-aiter 0.1.7, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from hal_attn.simulation.aten import host_offsets
from hal_attn.simulation.attention import Attended, Band, attend, attend_packed

TUNED_ARCHITECTURES = ("gfx942", "gfx950")
Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class SimulatedAiterTriton:
    """The module's functions on one generation; a row without keys gives LSE `empty_lse`, 0.0 by the vendor."""

    architecture: str
    empty_lse: float = 0.0

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = True,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        config: dict[str, Any] | None = None,
    ) -> Result:
        self._check(q, v, window_size, bias, config)
        attended = attend(
            q,
            k,
            v,
            visible=Band(right=0 if causal else -1).visible(q.shape[1], k.shape[1]),
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            slopes=_batched(alibi_slopes),
            dropout_p=dropout_p,
        )
        return self._returned(attended, q, attended.lse_with(self.empty_lse), return_lse, return_attn_probs)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
        out: Tensor | None = None,
        config: dict[str, Any] | None = None,
    ) -> Result:
        self._check(q, v, window_size, bias, config)
        attended = attend_packed(
            q,
            k,
            v,
            host_offsets(cu_seqlens_q, max_seqlen_q),
            host_offsets(cu_seqlens_k, max_seqlen_k),
            band=Band(right=0 if causal else -1),
            slopes=_batched(alibi_slopes),
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            dropout_p=dropout_p,
        )
        lse = attended.lse_with(self.empty_lse).transpose(0, 1).contiguous()
        return self._returned(attended, q, lse, return_lse, return_attn_probs)

    def _check(
        self, q: Tensor, v: Tensor, window_size: tuple[int, int], bias: Tensor | None, config: dict[str, Any] | None
    ) -> None:
        if bias is not None:
            raise ValueError("Bias is not supported yet in the Triton Backend")
        if tuple(window_size) != (-1, -1):
            raise ValueError("Sliding Window is not supported yet in the Triton Backend")
        if config is None and self.architecture not in TUNED_ARCHITECTURES:
            raise KeyError(self.architecture)
        difference = q.shape[-1] - v.shape[-1]
        assert not difference or all(_power_of_two(dim) for dim in (v.shape[-1], difference))

    def _returned(
        self, attended: Attended, q: Tensor, lse: Tensor, return_lse: bool, return_attn_probs: bool
    ) -> Result:
        output = attended.output
        if output.requires_grad and q.shape[-1] % 8:
            _refuse_backward(output)
        result = [output]
        if return_lse:
            result.append(lse.detach())
        if return_attn_probs:
            result.append(torch.empty(0))
        return result[0] if len(result) == 1 else tuple(result)


def _batched(slopes: Tensor | None) -> Tensor | None:
    if slopes is not None and slopes.dim() != 2:
        raise IndexError("Dimension out of range (expected to be in range of [-1, 0], but got 1)")
    return slopes


def _power_of_two(number: int) -> bool:
    return number >= 16 and not number & (number - 1)


def _refuse_backward(output: Tensor) -> None:
    """The backward pass gives gradients of the head dim that it padded to, which autograd refuses."""

    def refuse(gradient: Tensor) -> NoReturn:
        raise RuntimeError("a gradient at index 0 has an invalid shape")

    output.register_hook(refuse)
