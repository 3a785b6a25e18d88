"""What a backend can do, as data, and the one reader of that data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend computes right. The defaults claim no option, so a new one is refused until someone claims it.

    Attributes:
        dtypes: of query, key and value.
        max_head_dim: largest head dimension of query, key or value; None is any.
        head_dim_multiple: head dimensions must be a multiple of this (after the adapter's own exact padding).
        value_head_dim: value may have another head dimension than query and key.
        grouped_heads: fewer key heads than query heads.
        causal: "square" where the triangle is only right with as many queries as keys in each sequence, "bottom_right"
            where it is right with any lengths.
        window: sliding windows, aligned to the bottom right.
        masks: kinds of four-dimensional masks; with `mask_dtype_of_query`, a float mask must have the query's dtype.
        key_padding_mask, softcap, sinks, alibi_slopes, dropout, deterministic: the options of the same names.
        lse: can return the LSE; `lse_gradient` where a gradient flows back through it.
        gradients: of query, key and value; `option_gradients` names the options that get theirs.
        masked_values_ignored: values at hidden keys, NaN included, do not reach the output.
        sequences_isolated: NaN and inf in one sequence of a packed call do not reach the others. The one promise that
            is made unless it is taken back: a kernel that loads whole tiles of keys, beyond the end of a sequence, and
            multiplies them by a weight of 0 cannot keep it. Finite values never reach another sequence.
    """

    dtypes: frozenset[torch.dtype] = frozenset()
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    value_head_dim: bool = False
    grouped_heads: bool = False
    causal: Literal["none", "square", "bottom_right"] = "none"
    window: bool = False
    masks: frozenset[str] = frozenset()
    mask_dtype_of_query: bool = False
    key_padding_mask: bool = False
    softcap: bool = False
    sinks: bool = False
    alibi_slopes: bool = False
    dropout: bool = False
    deterministic: bool = False
    lse: bool = False
    lse_gradient: bool = False
    gradients: bool = False
    option_gradients: frozenset[str] = frozenset()
    masked_values_ignored: bool = False
    sequences_isolated: bool = True

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        """Every rule of these capabilities that `request` breaks; empty where it is claimed."""
        return tuple(refusal for rule in _RULES for refusal in rule(self, request))


def _numbers(has: Capabilities, wants: AttentionRequest) -> Iterator[Refusal]:
    if wants.dtype not in has.dtypes:
        names = ", ".join(sorted(_short(dtype) for dtype in has.dtypes)) or "none"
        yield Refusal("dtype", _short(wants.dtype), names)
    for name, dim in (("head_dim", wants.head_dim), ("value_head_dim", wants.value_head_dim)):
        if has.max_head_dim is not None and dim > has.max_head_dim:
            yield Refusal(name, str(dim), f"at most {has.max_head_dim}")
        if dim % has.head_dim_multiple:
            yield Refusal(name, str(dim), f"a multiple of {has.head_dim_multiple}")
    if wants.value_head_dim != wants.head_dim and not has.value_head_dim:
        yield Refusal("value_head_dim", str(wants.value_head_dim), f"the head dim of query, {wants.head_dim}")
    if wants.kv_heads != wants.heads and not has.grouped_heads:
        yield Refusal("heads", f"{wants.heads} query heads over {wants.kv_heads} key heads", "as many key heads")


def _visibility(has: Capabilities, wants: AttentionRequest) -> Iterator[Refusal]:
    if wants.causal and has.causal == "none":
        yield Refusal("causal", "causal=True", "causal=False")
    if wants.causal and has.causal == "square" and not wants.equal_lengths:
        yield Refusal("causal", "key and query lengths that differ", "equal lengths, its triangle is top-left")
    if wants.window_size is not None and not has.window:
        yield Refusal("window_size", str(wants.window_size), "no window")
    if wants.mask != "none" and wants.mask not in has.masks:
        yield Refusal("mask", f"a {wants.mask} mask", " or ".join(sorted(has.masks)) or "no mask")
    if wants.mask == "float" and has.mask_dtype_of_query and wants.mask_dtype != wants.dtype:
        have = "no dtype" if wants.mask_dtype is None else _short(wants.mask_dtype)
        yield Refusal(
            "mask",
            f"a {have} mask",
            f"the dtype of query, {_short(wants.dtype)}",
            "mask.to(query.dtype), if rounding it is right",
        )
    if wants.key_padding_mask and not has.key_padding_mask:
        yield Refusal("key_padding_mask", "given", "none", "pack the sequences instead: varlen_attention")


def _options(has: Capabilities, wants: AttentionRequest) -> Iterator[Refusal]:
    given = {
        "softcap": wants.softcap > 0,
        "sinks": wants.sinks,
        "alibi_slopes": wants.alibi_slopes > 0,
        "dropout": wants.dropout_p > 0,
        "deterministic": wants.deterministic,
    }
    for name, wanted in given.items():
        if wanted and not getattr(has, name):
            have = {"softcap": str(wants.softcap), "dropout": f"dropout_p={wants.dropout_p}"}.get(name, "given")
            yield Refusal("dropout_p" if name == "dropout" else name, have, "off")


def _results(has: Capabilities, wants: AttentionRequest) -> Iterator[Refusal]:
    if wants.return_lse and not has.lse:
        yield Refusal("return_lse", "return_lse=True", "return_lse=False")
    if wants.needs_grad and not has.gradients:
        yield Refusal("gradients", "inputs that require gradients", "inference", "call it under torch.no_grad()")
    if wants.return_lse and wants.wants_gradient and has.gradients and not has.lse_gradient:
        yield Refusal(
            "return_lse",
            "an LSE whose gradient may be wanted",
            "no gradients",
            "detach the inputs or leave return_lse off",
        )
    for name in wants.needs_option_grad:
        if name not in has.option_gradients:
            yield Refusal("gradients", f"{name} that requires a gradient", f"{name} without", f"{name}.detach()")


_RULES: tuple[Callable[[Capabilities, AttentionRequest], Iterator[Refusal]], ...] = (
    _numbers,
    _visibility,
    _options,
    _results,
)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
