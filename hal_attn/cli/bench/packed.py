"""`hal-attn bench packed`: packed batches on a backend that knows only batches."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from hal_attn.bench.packed.batches import batches, quick_batches
from hal_attn.bench.packed.cell import Cell
from hal_attn.bench.packed.run import measure
from hal_attn.bench.timing import Rounds
from hal_attn.cli.bench import common
from hal_attn.cli.bench.common import Sinks, find_dtype, progress
from hal_attn.cli.selections import find_device
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.registry import default_registry
from hal_attn.selection import check_names


def packed(
    batch: Annotated[str | None, typer.Option(metavar="NAME,..", help="Of skewed, equal, mixed, tiny; all.")] = None,
    lengths: Annotated[str | None, typer.Option(metavar="N,N,..", help="A batch of these lengths instead.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Head dim.")] = 64,
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="The default one if not given.")] = None,
    memory: Annotated[bool, typer.Option(help="Also memory; on the CPU each way in a process of its own.")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="Of PyTorch on the CPU; its own number.")] = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in which all ways take turns.")] = 9,
    quick: common.Quick = False,
    json_to: common.Json = None,
    plot_to: common.Plot = None,
    compare_to: common.Compare = None,
    slower: common.Slower = 1.10,
    anyway: common.Anyway = False,
) -> None:
    """The padded route against one call a sequence, one padded call and length buckets, on the same kernel."""
    sinks = Sinks.checked(json_to, plot_to, compare_to, slower, anyway)
    registry = default_registry()
    target = find_device(device, registry)
    if backend is not None:
        check_names((backend,), "--backend", registry)
    found = find_dtype(dtype, "float32" if target.type == "cpu" else "bfloat16")
    cell = Cell(
        (),
        heads,
        head_dim,
        str(found).removeprefix("torch."),
        str(target),
        backend,
        threads or torch.get_num_threads(),
        Rounds(0.0, 1, 1) if quick else Rounds(0.0, rounds, rounds),
    )
    with progress(sinks.quiet) as tick:
        report = measure(_batches(batch, lengths, quick), cell, memory, tick)
    sinks.take(report, quick)


def _batches(names: str | None, lengths: str | None, quick: bool) -> dict[str, tuple[int, ...]]:
    known = quick_batches() if quick else batches()
    if lengths is not None:
        parts = lengths.split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            allowed = "whole numbers of at least 1 separated by commas, as in 4096,1024"
            raise InvalidAttentionInputError("--lengths", repr(lengths), allowed)
        return {"given": tuple(map(int, parts))}
    wanted = list(known) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise InvalidAttentionInputError("--batch", repr(name), f"any of {', '.join(known)}")
    return {name: known[name] for name in wanted}
