"""`hal-attn bench kernels`: every backend on every shape, and whether the best one is chosen."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from hal_attn.bench.kernels.measure import Wanted
from hal_attn.bench.kernels.row import BOTH, FORWARD
from hal_attn.bench.kernels.run import measure
from hal_attn.bench.kernels.shapes import SCALED, default_problems, parse_packed, parse_shape, quick_problems
from hal_attn.bench.problem import Problem
from hal_attn.bench.timing import Rounds
from hal_attn.cli.bench import common
from hal_attn.cli.bench.common import Sinks, find_dtype, progress
from hal_attn.cli.selections import find_device
from hal_attn.registry import default_registry
from hal_attn.selection import check_names
from hal_attn.settings import read


def kernels(
    shape: Annotated[
        list[str] | None, typer.Option(metavar="B=4,S=4096,H=32/8,D=128,causal", help="A dense batch; repeat it.")
    ] = None,
    packed: Annotated[
        list[str] | None, typer.Option(metavar="16384,20x1500,H=16,D=128", help="Packed sequences; repeat it.")
    ] = None,
    full_size: Annotated[bool, typer.Option("--full-size", help="On the CPU too, the shapes of accelerators.")] = False,
    backend: Annotated[str | None, typer.Option(metavar="NAME,..", help="Only these.")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Also forward and backward together.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Also peak memory, against the vendor's own call.")] = False,
    tuned: Annotated[bool, typer.Option("--tuned", help="Also what HAL_ATTN_AUTOTUNE=on chooses.")] = False,
    dtype: common.Dtype = None,
    device: common.Device = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Of each call on each shape, about.")] = 0.25,
    quick: common.Quick = False,
    json_to: common.Json = None,
    plot_to: common.Plot = None,
    compare_to: common.Compare = None,
    slower: common.Slower = 1.10,
    anyway: common.Anyway = False,
) -> None:
    """Time, memory and error of every backend on every shape, beside the vendor's own call.

    Without --shape and --packed ten shapes: seven batched, three packed; on the CPU scaled down.
    """
    sinks = Sinks.checked(json_to, plot_to, compare_to, slower, anyway)
    registry = default_registry()
    target = find_device(device, registry)
    names = () if backend is None else tuple(name.strip() for name in backend.split(","))
    check_names(names, "--backend", registry)
    found = find_dtype(dtype, _usual(target))
    problems, notes = _problems(shape or [], packed or [], found, target, full_size, quick)
    rounds = Rounds(0.02, 2, 3) if quick else Rounds(seconds, 3, 100)
    passes = (FORWARD, BOTH) if backward else (FORWARD,)
    with progress(sinks.quiet) as tick:
        report = measure(problems, passes, target, Wanted(rounds, names, memory), tuned, notes, tick)
    sinks.take(report, quick)


def _usual(device: torch.device) -> str:
    """What vendors' kernels take, or a CPU is quick with."""
    simulated = default_registry().platform_for(device, read()).simulated
    return "bfloat16" if device.type != "cpu" or simulated else "float32"


def _problems(
    shapes: list[str], packed: list[str], dtype: torch.dtype, device: torch.device, full_size: bool, quick: bool
) -> tuple[list[Problem], list[str]]:
    asked = [parse_shape(text, dtype) for text in shapes] + [parse_packed(text, dtype) for text in packed]
    if asked:
        return asked, []
    if quick:
        return quick_problems(dtype), []
    scaled = device.type == "cpu" and not full_size
    return default_problems(dtype, scaled), [SCALED] if scaled else []
