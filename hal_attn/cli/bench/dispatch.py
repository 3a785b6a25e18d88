"""`hal-attn bench dispatch`: what one call costs on the host, beside diffusers and transformers."""

from __future__ import annotations

from typing import Annotated

import typer

from hal_attn.bench.dispatch.run import Effort, measure
from hal_attn.cli.bench import common
from hal_attn.cli.bench.common import Sinks, progress
from hal_attn.cli.selections import find_device
from hal_attn.registry import default_registry


def dispatch(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in which all calls take turns.")] = 25,
    calls: Annotated[int, typer.Option(min=1, help="Calls of each in a round.")] = 300,
    peers: Annotated[bool, typer.Option(help="Also diffusers and transformers, where they are installed.")] = True,
    device: common.Device = None,
    quick: common.Quick = False,
    json_to: common.Json = None,
    plot_to: common.Plot = None,
    compare_to: common.Compare = None,
    slower: common.Slower = 1.10,
    anyway: common.Anyway = False,
) -> None:
    """The host's time of one call on tiny inputs, one thread, beyond the bare call that it ends in.

    On the CPU the calls of the default backend; on an accelerator those of each backend beside its vendor's own call.
    """
    sinks = Sinks.checked(json_to, plot_to, compare_to, slower, anyway)
    target = find_device(device, default_registry())
    effort = Effort(3, 20) if quick else Effort(rounds, calls)
    with progress(sinks.quiet) as tick:
        report = measure(target, effort, peers, tick)
    sinks.take(report, quick)
