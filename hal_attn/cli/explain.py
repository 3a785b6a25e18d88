"""`hal-attn explain`: which backend a call would take, and every rule by which each other one refuses it."""

from __future__ import annotations

import os
import warnings
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor

import hal_attn
from hal_attn import registry as registries
from hal_attn.cli import output
from hal_attn.cli.env import inspect
from hal_attn.cli.selections import candidates_table, find_device, selection_facts, selection_json
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.packing import PackedSequences
from hal_attn.registry import Registry
from hal_attn.request import AttentionRequest
from hal_attn.selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of one call, as given; None is a flag that was not given."""

    batch: int | None
    seqlen: int | None
    seqlen_k: int | None
    lengths: str | None
    lengths_k: str | None
    heads: int
    kv_heads: int | None
    head_dim: int
    value_head_dim: int | None
    dtype: str
    device: str | None
    causal: bool
    window: str | None
    mask: str | None
    key_padding_mask: bool
    softcap: float
    sinks: bool
    alibi: bool
    dropout: float
    deterministic: bool
    return_lse: bool
    grad: bool
    scale: float | None
    backend: str | None


def _size(flag: str, text: str, least: int = 1) -> object:
    return typer.Option(flag, min=least, metavar="N", help=text)


def explain(
    batch: Annotated[int | None, _size("--batch", "Sequences of a batched call; 1 if not given.", 0)] = None,
    seqlen: Annotated[int | None, _size("--seqlen", "Queries of each sequence; 1024 if not given.", 0)] = None,
    seqlen_k: Annotated[int | None, _size("--seqlen-k", "Keys of each sequence; as many as queries.", 0)] = None,
    lengths: Annotated[str | None, typer.Option(metavar="N,N,..", help="Packed: queries of each sequence.")] = None,
    lengths_k: Annotated[str | None, typer.Option(metavar="N,N,..", help="Packed: keys of each sequence.")] = None,
    heads: Annotated[int, _size("--heads", "Heads of query.")] = 16,
    kv_heads: Annotated[int | None, _size("--kv-heads", "Heads of key and value; as many as query has.")] = None,
    head_dim: Annotated[int, _size("--head-dim", "Head dimension of query and key.")] = 64,
    value_head_dim: Annotated[int | None, _size("--value-head-dim", "Head dimension of value; that of query.")] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="A floating-point dtype of PyTorch.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(metavar="NAME", help="As in cuda:0; the accelerator, else cpu.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Hide later keys, aligned to the bottom right.")] = False,
    window: Annotated[str | None, typer.Option(metavar="L,R", help="Sliding window; -1 is unlimited.")] = None,
    mask: Annotated[str | None, typer.Option(metavar="bool|float", help="A mask [1, 1, Sq, Sk].")] = None,
    key_padding_mask: Annotated[bool, typer.Option("--key-padding-mask", help="A mask [B, Sk].")] = False,
    softcap: Annotated[float, typer.Option(help="Cap of the scores; 0 is off.")] = 0.0,
    sinks: Annotated[bool, typer.Option("--sinks", help="One more logit a head.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi slopes, one a head.")] = False,
    dropout: Annotated[float, typer.Option(metavar="P", help="Probability of dropping a weight.")] = 0.0,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Bitwise equal on repeat.")] = False,
    return_lse: Annotated[bool, typer.Option("--return-lse", help="Also return the LSE.")] = False,
    grad: Annotated[bool, typer.Option("--grad", help="Gradients of query, key and value are wanted.")] = False,
    scale: Annotated[float | None, typer.Option(help="Factor on the scores; 1/sqrt(D) if not given.")] = None,
    backend: Annotated[str | None, typer.Option(metavar="NAME,..", help="Only these, in this order.")] = None,
    as_json: output.Json = False,
) -> None:
    """Show which backend a call would take, and every rule by which each other one refuses it.

    Without --lengths the call is a batch, [B, S, H, D]; with it, packed sequences, [T, H, D].
    """
    given = {name: value for name, value in locals().items() if name != "as_json"}
    registry = registries.default_registry()
    unknown = inspect(os.environ, registry).unknown
    for variable in unknown:
        typer.echo(f"hal-attn: {variable.name}: {variable.problem}", err=True)
    with warnings.catch_warnings():
        # They are said above, once each and without the traceback of a warning.
        warnings.filterwarnings("ignore", "unknown environment variable", UserWarning)
        selection = select(Flags(**given), registry)
    if as_json:
        output.print_json(_as_json(selection))
    else:
        _print(selection)
    if selection.chosen is None:
        raise typer.Exit(1)


def select(flags: Flags, registry: Registry) -> Selection:
    """The selection of the call that `flags` describe. Its tensors share one element of memory.

    Raises:
        InvalidAttentionInputError, ConfigurationError: as the call itself would, or a flag that is no option's value.
        UnsupportedAttentionError: no platform here runs tensors on the device.
    """
    dtype, device = _dtype(flags.dtype), find_device(flags.device, registry)
    # Every tensor of the call is a view of one element, so that no shape is too large to ask about.
    one = torch.empty((), dtype=dtype, device=device, requires_grad=flags.grad)
    options = _plain_options(flags)
    lengths, lengths_k = _packed_lengths(flags)
    rows: tuple[int, ...]
    rows_k: tuple[int, ...]
    if lengths is None:
        batch = 1 if flags.batch is None else flags.batch
        seqlen = 1024 if flags.seqlen is None else flags.seqlen
        rows, rows_k = (batch, seqlen), (batch, seqlen if flags.seqlen_k is None else flags.seqlen_k)
    else:
        options["sequences"] = PackedSequences.from_lengths(lengths, lengths_k, device=device)
        rows, rows_k = (sum(lengths),), (sum(lengths if lengths_k is None else lengths_k),)
    kv_heads = flags.heads if flags.kv_heads is None else flags.kv_heads
    value_head_dim = flags.head_dim if flags.value_head_dim is None else flags.value_head_dim
    return hal_attn.explain(
        _seen_as(one, *rows, flags.heads, flags.head_dim),
        _seen_as(one, *rows_k, kv_heads, flags.head_dim),
        _seen_as(one, *rows_k, kv_heads, value_head_dim),
        **options,
        **_tensor_options(flags, one.detach(), rows, rows_k),
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        allowed = "a floating-point dtype of PyTorch, as in bfloat16, float16, float32"
        raise InvalidAttentionInputError("--dtype", repr(name), allowed)
    return dtype


def _seen_as(one: Tensor, *shape: int) -> Tensor:
    try:
        return one.expand(shape)
    except (RuntimeError, TypeError):
        allowed = "a shape whose elements PyTorch can count"
        raise InvalidAttentionInputError("shape", list(shape), allowed, "name smaller sizes") from None


def _packed_lengths(flags: Flags) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Query and key lengths of a packed call, None for keys packed like queries; both None for a batched call."""
    if flags.lengths is None:
        if flags.lengths_k is not None:
            raise InvalidAttentionInputError("--lengths-k", "given without --lengths", "both, for a packed call")
        return None, None
    batched = {"--batch": flags.batch, "--seqlen": flags.seqlen, "--seqlen-k": flags.seqlen_k}
    for flag, value in batched.items():
        if value is not None:
            raise InvalidAttentionInputError(
                flag, "given beside --lengths", "one of them", "--lengths is a packed call"
            )
    allowed = "whole numbers separated by commas, as in 5,9,2"
    lengths_k = None if flags.lengths_k is None else _integers("--lengths-k", flags.lengths_k, allowed)
    return _integers("--lengths", flags.lengths, allowed), lengths_k


def _integers(flag: str, text: str, allowed: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidAttentionInputError(flag, repr(text), allowed) from None


def _plain_options(flags: Flags) -> dict[str, object]:
    options: dict[str, object] = {
        "scale": flags.scale,
        "causal": flags.causal,
        "softcap": flags.softcap,
        "dropout_p": flags.dropout,
        "deterministic": flags.deterministic,
        "return_lse": flags.return_lse,
    }
    if flags.window is not None:
        options["window_size"] = _integers("--window", flags.window, "two whole numbers, as in 128,0; -1 is unlimited")
    if flags.backend is not None:
        options["backend"] = tuple(name.strip() for name in flags.backend.split(","))
    return options


def _tensor_options(flags: Flags, one: Tensor, rows: tuple[int, ...], rows_k: tuple[int, ...]) -> dict[str, Tensor]:
    options: dict[str, Tensor] = {}
    if flags.mask is not None:
        if flags.mask not in ("bool", "float"):
            raise InvalidAttentionInputError("--mask", repr(flags.mask), "bool or float")
        mask = one.bool() if flags.mask == "bool" else one
        options["mask"] = _seen_as(mask, 1, 1, rows[-1], rows_k[-1])
    if flags.key_padding_mask:
        options["key_padding_mask"] = _seen_as(one.bool(), *rows_k)
    if flags.sinks:
        options["sinks"] = _seen_as(one.float(), flags.heads)
    if flags.alibi:
        options["alibi_slopes"] = _seen_as(one.float(), flags.heads)
    return options


def _as_json(selection: Selection) -> dict[str, object]:
    request = selection.request
    return {
        "ok": selection.chosen is not None,
        "request": {"description": request.describe(), **_request_json(request)},
        **selection_json(selection),
    }


def _request_json(request: AttentionRequest) -> dict[str, object]:
    dtypes = {name: value for name, value in asdict(request).items() if isinstance(value, torch.dtype)}
    names = {name: str(value).removeprefix("torch.") for name, value in dtypes.items()}
    return {**asdict(request), **names, "device": str(request.device)}


def _print(selection: Selection) -> None:
    output.show(selection_facts(selection), "", candidates_table(selection))
    if selection.chosen is None:
        output.show("", "No backend takes this call: change what the rules above name, or name another backend.")
