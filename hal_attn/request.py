"""What one attention call asks for: frozen, hashable, and free of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

MaskKind = Literal["none", "bool", "float"]


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """Shapes, dtypes and options of one call, checked and in canonical form.

    Canonical: `window_size` is None unless it hides a key that `causal` does not; `-1` in it is unlimited; a band whose
    right edge is 0 is `causal`; a `causal` that hides nothing (one query) is False. So a backend that knows causal only
    also serves every other spelling of causal.

    Attributes:
        packed: `[T, H, D]` tensors with several sequences, else `[B, S, H, D]`.
        batch: sequences in the call.
        seqlen_q, seqlen_k: the (longest) query and key length; None where only the device knows it.
        tokens_q, tokens_k: rows of query and key over all sequences.
        equal_lengths: every sequence has as many queries as keys.
        uniform: all sequences of one packed call have the same lengths; always true when batched.
        mask: kind of the four-dimensional mask; `mask_dtype`, `mask_shape` describe it.
        key_padding_mask, sinks: whether they are given.
        alibi_slopes: number of dimensions of the slopes, 0 where there are none.
        needs_grad: gradients of query, key or value are wanted; `needs_option_grad` names the options that want theirs.
    """

    packed: bool
    device: torch.device
    dtype: torch.dtype
    batch: int
    seqlen_q: int | None
    seqlen_k: int | None
    tokens_q: int
    tokens_k: int
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    equal_lengths: bool = True
    uniform: bool = True
    scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] | None = None
    mask: MaskKind = "none"
    mask_dtype: torch.dtype | None = None
    mask_shape: tuple[int, ...] | None = None
    key_padding_mask: bool = False
    softcap: float = 0.0
    sinks: bool = False
    alibi_slopes: int = 0
    dropout_p: float = 0.0
    deterministic: bool = False
    return_lse: bool = False
    needs_grad: bool = False
    needs_option_grad: tuple[str, ...] = ()

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores: `scale`, or `1/sqrt(D)` of the head dimension that the caller passed."""
        if self.scale is not None:
            return self.scale
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def wants_gradient(self) -> bool:
        """A gradient is wanted, of query, key or value or of an option."""
        return self.needs_grad or bool(self.needs_option_grad)

    def options(self) -> dict[str, Any]:
        """The plain (tensor-free) options that differ from their defaults, as keyword arguments of a backend."""
        given: dict[str, Any] = {}
        for name, default in _PLAIN_DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                given[name] = value
        return given

    def describe(self) -> str:
        """One line for a person: shapes, dtype, device and the options given."""
        if self.packed:
            shape = (
                f"packed {self.batch} sequences, {self.tokens_q} queries (longest {_length(self.seqlen_q)}), "
                f"{self.tokens_k} keys (longest {_length(self.seqlen_k)})"
            )
        else:
            shape = f"batch {self.batch}, {self.seqlen_q} queries, {self.seqlen_k} keys"
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads} heads"
        dims = f"dim {self.head_dim}"
        if self.value_head_dim != self.head_dim:
            dims += f"/{self.value_head_dim}"
        extras = [f"{name}={value}" for name, value in self.options().items()]
        extras += [f"{self.mask} mask"] if self.mask != "none" else []
        extras += [name for name in ("key_padding_mask", "sinks", "alibi_slopes") if getattr(self, name)]
        extras += ["gradients"] if self.wants_gradient else []
        dtype = str(self.dtype).removeprefix("torch.")
        return ", ".join([shape, heads, dims, dtype, str(self.device), *extras])


_PLAIN_DEFAULTS: dict[str, object] = {
    "scale": None,
    "causal": False,
    "window_size": None,
    "softcap": 0.0,
    "dropout_p": 0.0,
    "deterministic": False,
    "return_lse": False,
}


def _length(value: int | None) -> str:
    return "unknown on the host" if value is None else str(value)


def canonical_band(
    causal: bool, window_size: tuple[int, int] | None, seqlen_q: int | None, seqlen_k: int | None
) -> tuple[bool, tuple[int, int] | None]:
    """Canonical `(causal, window_size)` of one call whose longest lengths are given; None is an unknown length.

    A left edge of `Sk - 1` or more and a right edge of `Sq - 1` or more hide nothing, in sequences of any length up to
    these (SEMANTICS: `i + Sk - Sq - left <= j <= i + Sk - Sq + right`).
    """
    left, right = window_size if window_size is not None else (-1, -1)
    if causal:
        right = 0
    if seqlen_k is not None and left >= max(seqlen_k - 1, 0):
        left = -1
    if seqlen_q is not None and right >= max(seqlen_q - 1, 0):
        right = -1
    causal = right == 0
    if left == -1 and right in (-1, 0):
        return causal, None
    return causal, (left, right)


TENSOR_OPTIONS = ("mask", "key_padding_mask", "sinks", "alibi_slopes")


def tensor_options(options: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors among the options of a call, by name."""
    return {name: value for name in TENSOR_OPTIONS if isinstance(value := options.get(name), Tensor)}
