"""One call of the kit: its tensors and options, on the CPU, and the same on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hal_attn.packing import PackedSequences
from hal_attn.testing.tensors import Tensors, dense, packed, randn

# What a refusal of an argument may be called besides the argument's own name.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "dropout_p": ("dropout",),
    "heads": ("grouped_heads", "kv_heads"),
    "head_dim": ("value_head_dim",),
    "value_head_dim": ("head_dim",),
    "causal": ("window_size",),
    "window_size": ("causal",),
    "gradients": ("needs_grad",),
    "return_lse": ("lse", "gradients"),
}

# What every call sets: its tensors and their lengths.
SHAPES = ("query", "key", "value", "seqlen_q", "seqlen_k", "cu_seqlens", "max_seqlen", "sequences")


@dataclass(frozen=True, slots=True)
class Base:
    """What every call of one round has where its case says nothing else."""

    dtype: torch.dtype
    head_dim: int
    heads: int = 4


@dataclass(frozen=True, eq=False)
class Problem:
    """A call: query, key, value, options by name (tensors among them) and, if it is packed, its sequences.

    Attributes:
        sets: the arguments that it sets to more than a plain call has; what a refusal of it may name.
        layout: makes the tensors as the call gets them (views, strides) from contiguous ones.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: Mapping[str, Any] = field(default_factory=dict)
    sequences: PackedSequences | None = None
    sets: tuple[str, ...] = ()
    layout: Callable[[Tensor, Tensor, Tensor], Tensors] | None = None

    @property
    def tensors(self) -> Tensors:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def packed(self) -> bool:
        """It is a call of `varlen_attention`."""
        return self.sequences is not None

    @property
    def given(self) -> dict[str, Any]:
        """The options and the sequences, as keyword arguments."""
        return dict(self.options) if self.sequences is None else {**self.options, "sequences": self.sequences}

    def with_options(self, **options: Any) -> Problem:
        """The same call with these options too; one that is None is left out."""
        merged = {name: value for name, value in {**self.options, **options}.items() if value is not None}
        return replace(self, options=merged, sets=(*self.sets, *options))

    def on(self, device: torch.device, *, requires_grad: bool = False) -> Problem:
        """A copy of its tensors on `device`, laid out as the call gets them; leaves where gradients are wanted."""
        copies = [tensor.detach().to(device, copy=True) for tensor in self.tensors]
        if requires_grad:
            copies = [tensor.requires_grad_() for tensor in copies]
        options = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in self.options.items()}
        query, key, value = copies
        return replace(self, query=query, key=key, value=value, options=options)

    def laid_out(self) -> Tensors:
        """Query, key and value as the call gets them."""
        return self.tensors if self.layout is None else self.layout(*self.tensors)

    def may_be_refused_as(self) -> set[str]:
        """Names that a refusal of what this call sets may bear."""
        return {*SHAPES, *self.sets, *(alias for name in self.sets for alias in ALIASES.get(name, ()))}


def batched(base: Base, seqlen_q: int = 37, seqlen_k: int = 65, **given: Any) -> Problem:
    """A batched call; what `dense` takes shapes it, the rest are options (or make one from (batch, heads, Sq, Sk))."""
    shape, options = _split(given)
    sets = _sets(shape, options)
    sizes = {"batch": 2, "heads": base.heads, "head_dim": base.head_dim, "dtype": base.dtype, **shape}
    tensors = dense(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes)
    scores = (sizes["batch"], sizes["heads"], seqlen_q, seqlen_k)
    made = {name: value(scores, base.dtype) if callable(value) else value for name, value in options.items()}
    return Problem(*tensors, made, sets=sets)


def varlen(
    base: Base, lengths: tuple[int, ...] = (37, 1, 20), lengths_k: tuple[int, ...] | None = None, **given: Any
) -> Problem:
    """A packed call; as `batched`, an option may be made from (sequences, heads, Tq, Tk)."""
    shape, options = _split(given)
    sets = _sets(shape, options)
    if lengths_k is not None and lengths_k != lengths:
        sets = (*sets, "cu_seqlens_k", "max_seqlen_k", "cu_seqlens_k_host")
    sizes = {"heads": base.heads, "head_dim": base.head_dim, "dtype": base.dtype, **shape}
    query, key, value, sequences = packed(lengths, lengths_k, **sizes)
    scores = (len(lengths), sizes["heads"], query.shape[0], key.shape[0])
    made = {name: item(scores, base.dtype) if callable(item) else item for name, item in options.items()}
    return Problem(query, key, value, made, sequences, sets)


Scores = tuple[int, int, int, int]


def bool_mask(*, broadcast: tuple[int, ...] = (), blind: bool = False) -> Callable[[Scores, torch.dtype], Tensor]:
    """A mask in which about half may attend: all of `[B, H, Sq, Sk]` but the dimensions of `broadcast`, which are 1;
    with `blind`, some queries see nothing and one key is seen by none. Else every query sees key 0."""

    def make(scores: Scores, dtype: torch.dtype) -> Tensor:
        shape = [1 if index in broadcast else size for index, size in enumerate(scores)]
        mask = randn(*shape, seed=101) > 0.2
        mask[..., 0] = True
        if blind:
            mask[0, :, shape[2] // 2] = False
            mask[..., shape[3] - 1] = False
        return mask

    return make


def float_mask(
    *, broadcast: tuple[int, ...] = (), hides: bool = False, dtype: torch.dtype | None = None
) -> Callable[[Scores, torch.dtype], Tensor]:
    """Numbers to add to the scores, in `dtype` or that of query; with `hides`, -inf in places and over a whole row."""

    def make(scores: Scores, own: torch.dtype) -> Tensor:
        shape = [1 if index in broadcast else size for index, size in enumerate(scores)]
        mask = randn(*shape, seed=102, dtype=dtype or own)
        if hides:
            mask = mask.masked_fill(randn(*shape, seed=103) > 0.5, -torch.inf)
            mask[..., 0] = 0.5
            mask[0, :, shape[2] // 2] = -torch.inf
        return mask

    return make


def padding(kind: str = "end") -> Callable[[Scores, torch.dtype], Tensor]:
    """`[B, Sk]`, True = a real key: padded at the "end", at the "start", in "holes", or one sequence "all" of it."""

    def make(scores: Scores, dtype: torch.dtype) -> Tensor:
        batch, seqlen_k = scores[0], scores[3]
        real = torch.ones(batch, seqlen_k, dtype=torch.bool)
        cut = seqlen_k // 3
        if kind == "end":
            real[-1, -cut:] = False
        elif kind == "start":
            real[-1, :cut] = False
        elif kind == "all":
            real[0] = False
        else:
            real[:, 1::3] = False
        return real

    return make


def sinks(spread: float = 1.0) -> Callable[[Scores, torch.dtype], Tensor]:
    """`[H]` float32."""
    return lambda scores, dtype: randn(scores[1], seed=104, spread=spread)


def slopes(*, batch: bool = False) -> Callable[[Scores, torch.dtype], Tensor]:
    """ALiBi slopes `[H]`, or `[B, H]`, float32."""

    def make(scores: Scores, dtype: torch.dtype) -> Tensor:
        shape = scores[:2] if batch else scores[1:2]
        return randn(*shape, seed=105).abs() * 0.3 + 0.02

    return make


_SHAPE = ("batch", "heads", "kv_heads", "head_dim", "value_head_dim", "dtype", "spread", "seed")


def _split(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    shape = {name: value for name, value in given.items() if name in _SHAPE}
    return shape, {name: value for name, value in given.items() if name not in _SHAPE}


def _sets(shape: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, ...]:
    named = {"kv_heads": "heads", "heads": "heads", "head_dim": "head_dim", "value_head_dim": "value_head_dim"}
    named |= {"dtype": "dtype", "batch": "batch"}
    return (*(named[name] for name in shape if name in named), *options)
