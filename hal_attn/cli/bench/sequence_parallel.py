"""`hal-attn bench sequence-parallel`: modes of sequence parallelism, under `torchrun`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer

from hal_attn.bench.problem import Problem, mixed_lengths, problems
from hal_attn.bench.sequence_parallel.contenders import MODES, parse_modes
from hal_attn.bench.sequence_parallel.effort import Effort
from hal_attn.bench.sequence_parallel.ranks import joined
from hal_attn.bench.sequence_parallel.run import Wanted, measure
from hal_attn.cli.bench import common
from hal_attn.cli.bench.common import Sinks, find_dtype, progress
from hal_attn.cli.selections import find_device
from hal_attn.errors import HalAttnError, InvalidAttentionInputError
from hal_attn.registry import default_registry


def sequence_parallel(
    tokens: Annotated[str | None, typer.Option(metavar="N,..", help="Tokens of dense problems.")] = None,
    packed: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,..", help="Lengths of a packed problem; 'mixed': from 16384 to 32, for each --tokens."
        ),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 24,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key heads; as many as query heads if not given.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Head dim.")] = 128,
    dtype: common.Dtype = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="One of them; both if not given.")] = None,
    modes: Annotated[
        str, typer.Option(metavar="NAME,..", help=f"Of {', '.join(MODES)}.")
    ] = "ulysses,ring,kv_gather,ulysses x ring",
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="For one rank and for every mode; 'fastest' tries all.")
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Also forward and backward together.")] = False,
    peers: Annotated[bool, typer.Option(help="Also yunchang, and PyTorch's context parallelism.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Samples, whose median counts.")] = 5,
    layers: Annotated[int, typer.Option(min=1, help="Calls in a row in a sample.")] = 1,
    device: common.Device = None,
    json_to: common.Json = None,
    plot_to: common.Plot = None,
    compare_to: common.Compare = None,
    slower: common.Slower = 1.10,
    anyway: common.Anyway = False,
) -> None:
    """Time, bytes sent and memory of each mode against one rank with the whole problem, once it is seen to be right.

    Start it with: torchrun --nproc-per-node=N --no-python hal-attn bench sequence-parallel. Alone it runs one rank.
    """
    with _said_once():
        target = find_device(device, default_registry())
        names = parse_modes(modes)
        sinks = Sinks.checked(json_to, plot_to, compare_to, slower, anyway)
        wanted = Wanted(
            _problems(tokens, packed, heads, heads if kv_heads is None else kv_heads, head_dim, dtype, causal, target),
            names,
            backend,
            backward,
            peers,
            Effort(repeats, layers),
        )
    with joined(target) as ranks:
        with progress(sinks.quiet or not ranks.first) as tick:
            result = measure(ranks, wanted, tick)
        if ranks.first:
            sinks.take(result.report())
    if not result.ok:
        raise typer.Exit(1)


@contextmanager
def _said_once() -> Iterator[None]:
    """What is wrong with the arguments is wrong on every rank: rank 0 says it."""
    try:
        yield
    except HalAttnError:
        if os.environ.get("RANK", "0") != "0":
            raise typer.Exit(2) from None
        raise


def _problems(
    tokens: str | None,
    packed: str | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str | None,
    causal: bool | None,
    device: torch.device,
) -> list[Problem]:
    if heads % kv_heads:
        raise InvalidAttentionInputError("--kv-heads", str(kv_heads), f"a divisor of --heads, {heads}")
    found = find_dtype(dtype, "float32" if device.type == "cpu" else "bfloat16")
    if tokens is None and packed in (None, "mixed"):
        tokens = "1024" if device.type == "cpu" else "16384"
    dense = () if tokens is None else _counts("--tokens", tokens)
    if packed == "mixed":
        lengths = [mixed_lengths(count) for count in dense]
    else:
        lengths = [] if packed is None else [_counts("--packed", packed)]
    bands = (False, True) if causal is None else (causal,)
    return problems(dense, lengths, bands, heads, kv_heads, head_dim, found)


def _counts(flag: str, text: str) -> tuple[int, ...]:
    allowed = "whole numbers of at least 1 separated by commas, as in 4096,1024"
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidAttentionInputError(flag, repr(text), allowed) from None
    if min(found) < 1:
        raise InvalidAttentionInputError(flag, repr(text), allowed)
    return found
