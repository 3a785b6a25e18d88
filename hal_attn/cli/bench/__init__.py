"""`hal-attn bench`: measurements, each a command of its own; under `torchrun` where it needs several ranks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import typer

SUMMARY = "How fast: measured here, against the ideal and against peers."
Verb = Callable[..., None]

VERBS = {
    "dispatch": "What one call costs on the host.",
    "kernels": "Every backend on every shape.",
    "packed": "Packed batches on a batched-only backend.",
    "sequence-parallel": "Modes of sequence parallelism.",
    "show": "A file of one of these: table, picture, comparison.",
}


def make_bench(readable: Callable[[Verb], Verb]) -> typer.Typer:
    """The group of commands; `readable` wraps each of them as it does every verb."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=SUMMARY)
    group.callback()(_bench)
    for verb, summary in VERBS.items():
        name = verb.replace("-", "_")
        run = getattr(import_module(f"hal_attn.cli.bench.{name}"), name)
        group.command(verb, short_help=summary)(readable(run))
    return group


def _bench() -> None:
    """How fast: measured here, against the ideal and against peers."""
