"""Acme's functions on CPU tensors, for whoever lacks the device: `HAL_ATTN_SIMULATE=acme`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from hal_attn.portable.math import MathBackend
from hal_attn.simulation.attention import Attended, Band, attend, attend_packed
from hal_attn.simulation.platform import SimulatedPlatform
from hal_attn.simulation.spec import SimulationSpec
from torch import Tensor

from hal_attn_acme.fused import AcmeFusedBackend
from hal_attn_acme.packed import AcmePackedBackend
from hal_attn_acme.platform import AcmePlatform


def simulated_kernels(empty_lse: float) -> Any:
    """`acme_torch.kernels`; `empty_lse` is the LSE of a row without keys, which the vendor leaves open."""

    def packed_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Sequence[int],
        ends_k: Sequence[int],
        factor: float = 1.0,
        triangle: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if query.dtype != torch.float32 or query.shape[1:] != key.shape[1:] or key.shape != value.shape:
            raise RuntimeError("packed_attention: float32, one shape of heads for query, key and value")
        band = Band(None, 0 if triangle else None, top_left=True)
        found = attend_packed(query, key, value, (0, *ends), (0, *ends_k), band=band, scale=factor)
        return found.output, _base_2(found).T

    def fused_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factor: float = 1.0,
        before: int | None = None,
        after: int | None = None,
        with_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.dtype != torch.float16 or query.shape[3] % 16 or query.shape[2] != key.shape[2]:
            raise RuntimeError("fused_attention: float16, head dims in steps of 16, as many key heads as query heads")
        visible = Band(before, after).visible(query.shape[1], key.shape[1])
        found = attend(query, key, value, scale=factor, visible=visible)
        return found.output, _base_2(found).transpose(1, 2) if with_lse else None

    def _base_2(found: Attended) -> Tensor:
        return found.lse_with(empty_lse) / math.log(2)

    return SimpleNamespace(packed_attention=packed_attention, fused_attention=fused_attention)


class SimulatedAcme(SimulatedPlatform, AcmePlatform):
    """An Acme device on CPU tensors."""

    def __init__(self, spec: SimulationSpec) -> None:
        super().__init__(spec)
        kernels = simulated_kernels(math.nan if spec.empty_lse is None else spec.empty_lse)
        self._backends = (
            AcmeFusedBackend(lambda: kernels, self.architecture),
            AcmePackedBackend(lambda: kernels),
            MathBackend(),
        )

    @classmethod
    def parse(cls, text: str | None) -> SimulatedAcme:
        """As HAL_ATTN_SIMULATE says it after "acme:"."""
        return cls(SimulationSpec.parse(text, "acme", ("acme1",), {}))
