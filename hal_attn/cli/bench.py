"""`hal-attn bench`: measurements, each a command of its own; under `torchrun` where it needs several ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hal_attn.bench.contenders import MODES, parse_modes
from hal_attn.bench.plot import plot, require_matplotlib
from hal_attn.bench.problem import Problem, mixed_lengths, problems
from hal_attn.bench.ranks import Ranks, joined
from hal_attn.bench.run import Result, Tick, Wanted, measure
from hal_attn.bench.table import LEGEND, tables
from hal_attn.bench.timing import Effort
from hal_attn.cli import output
from hal_attn.cli.selections import find_device
from hal_attn.errors import HalAttnError, InvalidAttentionInputError
from hal_attn.registry import default_registry

SUMMARY = "How fast: measured here, against the ideal and against peers."
Verb = Callable[..., None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_bench(readable: Callable[[Verb], Verb]) -> typer.Typer:
    """The group of commands; `readable` wraps each of them as it does every verb."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=SUMMARY)
    group.callback()(_bench)
    group.command("sequence-parallel", short_help="Modes of sequence parallelism.")(readable(sequence_parallel))
    return group


def _bench() -> None:
    """How fast: measured here, against the ideal and against peers."""


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
    dtype: Annotated[str | None, typer.Option(metavar="|".join(_DTYPES), help="By the device if not given.")] = None,
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
    device: Annotated[str | None, typer.Option(metavar="NAME", help="cuda, cpu; the accelerator, else cpu.")] = None,
    json_to: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is stdout.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture, as PNG.")] = None,
) -> None:
    """Time, bytes sent and memory of each mode against one rank with the whole problem, once it is seen to be right.

    Start it with: torchrun --nproc-per-node=N --no-python hal-attn bench sequence-parallel. Alone it runs one rank.
    """
    with _said_once():
        target = find_device(device, default_registry())
        names = parse_modes(modes)
        if plot_to is not None:
            require_matplotlib()
        wanted = Wanted(
            _problems(tokens, packed, heads, heads if kv_heads is None else kv_heads, head_dim, dtype, causal, target),
            names,
            backend,
            backward,
            peers,
            Effort(repeats, layers),
        )
    with joined(target) as ranks:
        with _progress(ranks, quiet=json_to == "-") as tick:
            result = measure(ranks, wanted, tick)
        if ranks.first:
            _write(result, ranks, json_to, plot_to)
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
    usual = "float32" if device.type == "cpu" else "bfloat16"
    if (dtype or usual) not in _DTYPES:
        raise InvalidAttentionInputError("--dtype", repr(dtype), " or ".join(_DTYPES))
    if tokens is None and packed in (None, "mixed"):
        tokens = "1024" if device.type == "cpu" else "16384"
    dense = () if tokens is None else _counts("--tokens", tokens)
    if packed == "mixed":
        lengths = [mixed_lengths(count) for count in dense]
    else:
        lengths = [] if packed is None else [_counts("--packed", packed)]
    bands = (False, True) if causal is None else (causal,)
    return problems(dense, lengths, bands, heads, kv_heads, head_dim, _DTYPES[dtype or usual])


def _counts(flag: str, text: str) -> tuple[int, ...]:
    allowed = "whole numbers of at least 1 separated by commas, as in 4096,1024"
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidAttentionInputError(flag, repr(text), allowed) from None
    if min(found) < 1:
        raise InvalidAttentionInputError(flag, repr(text), allowed)
    return found


@contextmanager
def _progress(ranks: Ranks, quiet: bool) -> Iterator[Tick]:
    """A bar on stderr of rank 0 while it runs; none where nobody would see it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    disable = quiet or not ranks.first or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=disable) as bar:
        task = bar.add_task("", total=None)
        yield lambda description, done, steps: bar.update(task, description=description, completed=done, total=steps)


def _write(result: Result, ranks: Ranks, json_to: str | None, plot_to: Path | None) -> None:
    if json_to == "-":
        output.print_json(result.as_json())
    else:
        output.show(output.fields(result.facts), "", *tables(result.rows), *result.missing, LEGEND)
        if json_to is not None:
            Path(json_to).write_text(result.json() + "\n", encoding="utf-8")
    if plot_to is not None:
        title = f"{result.facts['device']}, {ranks.size} ranks; torch {torch.__version__}"
        plot(result.rows, ranks.size, title, plot_to)
