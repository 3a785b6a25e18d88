"""What one call of a plan is given: checked against the plan, and as ranks compare it before the first such call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal_attn.errors import InvalidAttentionInputError
from hal_attn.memo import identity_of
from hal_attn.packing import PackedSequences
from hal_attn.sequence_parallel.kernel import Settings
from hal_attn.sequence_parallel.masks import check_masks
from hal_attn.validation import packed_request

if TYPE_CHECKING:
    from hal_attn.sequence_parallel.plan import Plan


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of `Plan.attention`, as they came."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    mask: Tensor | None
    key_padding_mask: Tensor | None
    softcap: float
    sinks: Tensor | None
    deterministic: bool
    return_lse: bool
    backend: str | Sequence[str] | None

    @property
    def identity(self) -> object:
        """What the checks, the agreement and the settings depend on; None where only the checks can tell."""
        plain = (self.scale, False, self.softcap, 0.0, self.deterministic, self.return_lse)
        given = {
            name: tensor
            for name in ("mask", "key_padding_mask", "sinks")
            if (tensor := getattr(self, name)) is not None
        }
        try:
            found = identity_of(self.query, self.key, self.value, plain, None, given or None, self.backend)
            hash(found)
        except (TypeError, AttributeError):
            return None
        return found

    def told(self, plan: Plan) -> dict[str, object]:
        """What all ranks must have alike. Never fails: ranks with wrong arguments have to tell the others."""
        rows = 1 if plan.description.batch is None else 2
        tensors = (self.query, self.key, self.value, self.sinks)
        return {
            "query heads and head dim": _shape(self.query, rows),
            "key heads and head dim": _shape(self.key, rows),
            "value heads and head dim": _shape(self.value, rows),
            "dtype": str(getattr(self.query, "dtype", None)),
            "device": str(getattr(getattr(self.query, "device", None), "type", None)),
            "scale": self.scale,
            "softcap": self.softcap,
            "deterministic": self.deterministic,
            "return_lse": self.return_lse,
            "backend": None if self.backend is None else str(self.backend),
            "sinks": _shape(self.sinks),
            "mask": self._mask_told(plan),
            "key_padding_mask": self.key_padding_mask is not None,
            "gradients": torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors),
        }

    def checked(self, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as `[T, H, D]`.

        Raises:
            InvalidAttentionInputError: an argument is wrong by itself, or is not what the plan was made for.
        """
        query, key, value = (self._flat(plan, name) for name in ("query", "key", "value"))
        check_masks(plan, self.mask, self.key_padding_mask, query)
        options = {name: getattr(self, name) for name in ("scale", "softcap", "sinks", "deterministic", "return_lse")}
        packed_request(query, key, value, PackedSequences.from_lengths([query.shape[0]], [key.shape[0]]), options)
        have = {
            "num_heads": query.shape[1],
            "num_kv_heads": key.shape[1],
            "head_dim": query.shape[2],
            "value_head_dim": value.shape[2],
            "dtype": query.dtype,
            "device": query.device.type,
        }
        _check_expected(plan.expected, have)
        return query, key, value

    def settings(self, backend: str | Sequence[str] | None) -> Settings:
        """The plain options, and the backend that the group agreed on."""
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        return Settings(scale, self.softcap, self.deterministic, backend)

    def _mask_told(self, plan: Plan) -> object:
        shape = _shape(self.mask)
        if plan.description.masks == "sharded" and isinstance(shape, tuple) and len(shape) == 4:
            shape = (*shape[:2], shape[3])  # its rows are this rank's
        return None if self.mask is None else (str(getattr(self.mask, "dtype", None)), shape)

    def _flat(self, plan: Plan, name: str) -> Tensor:
        tensor, dense = getattr(self, name), plan.description.batch is not None
        rows = plan.rows if name == "query" else plan.rows_kv
        shape = "[B, S, H, D]" if dense else "[T, H, D]"
        if not isinstance(tensor, Tensor) or tensor.dim() != 3 + dense:
            got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise InvalidAttentionInputError(name, got, f"{shape}, as this plan is made for")
        batch = plan.description.batch
        flat = tensor.flatten(0, 1) if dense else tensor
        if flat.shape[0] != rows.count or (dense and tensor.shape[0] != batch):
            raise InvalidAttentionInputError(
                name,
                f"shape {tuple(tensor.shape)}, {flat.shape[0]} rows, on rank {plan.groups.rank}",
                f"the {rows.count} rows that the plan gives this rank" + (f", in a batch of {batch}" if dense else ""),
                "shard it with plan.shard, keys and values with plan.shard_kv",
            )
        return flat


def _shape(tensor: object, begin: int = 0) -> object:
    return tuple(tensor.shape[begin:]) if isinstance(tensor, Tensor) else type(tensor).__name__


def _check_expected(expected: Mapping[str, object], have: Mapping[str, object]) -> None:
    for name, value in have.items():
        if expected[name] is not None and expected[name] != value:
            raise InvalidAttentionInputError(name, str(value), f"what the plan was made for, {expected[name]}")
