"""`hal-attn demo`: a real sentence encoder on real text, packed, against its own padded attention."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Protocol

import torch
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from hal_attn.cli import output
from hal_attn.cli.selections import candidates_table, find_device, selection_facts, selection_json
from hal_attn.demo.comparison import REQUIRED_COSINE
from hal_attn.demo.model import NAME
from hal_attn.demo.run import REPEATS, Outcome, run_demo
from hal_attn.demo.sentences import TITLE, load_sentences
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.registry import default_registry

QUERY = "Would a cat eat a bat?"


class ReportProgress(Protocol):
    """What is being done, the steps of it that are done, and how many it has."""

    def __call__(self, description: str, done: int, steps: int) -> None: ...


def demo(
    query: Annotated[str, typer.Argument(help="What to look for in the text.")] = QUERY,
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many sentences; all if not given.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the nearest sentences to show.")] = 5,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Sentences of a batch.")] = 32,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="As in cuda:0; the accelerator, else cpu.")] = None,
    backend: Annotated[str | None, typer.Option(metavar="NAME,..", help="Only these, in this order.")] = None,
    as_json: output.Json = False,
) -> None:
    """Run a real encoder packed over real text, check it against its padded attention, and answer a query."""
    if not query.strip():
        raise InvalidAttentionInputError("QUERY", repr(query), "text to look for")
    sentences = load_sentences(limit)
    target = find_device(device, default_registry())
    with _progress(quiet=as_json) as progress:
        outcome = run_demo(
            sentences,
            query,
            device=target,
            backend=None if backend is None else [name.strip() for name in backend.split(",")],
            batch_size=batch_size,
            top=top,
            progress=progress,
        )
    if as_json:
        output.print_json(_as_json(outcome, sentences, query, target, batch_size))
    else:
        _print(outcome, sentences, query, target, batch_size)
    if not outcome.ok:
        raise typer.Exit(1)


@contextmanager
def _progress(quiet: bool) -> Iterator[ReportProgress]:
    """A bar on stderr while it runs; none where nobody would see it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    # The console's own answer is also yes where FORCE_COLOR is set, in a pipe too.
    disable = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=disable) as bar:
        task = bar.add_task("", total=None)
        yield lambda description, done, steps: bar.update(task, description=description, completed=done, total=steps)


def _as_json(
    outcome: Outcome, sentences: Sequence[str], query: str, device: torch.device, batch_size: int
) -> dict[str, object]:
    selection = outcome.selection
    return {
        "ok": outcome.ok,
        "model": NAME,
        "text": TITLE,
        "sentences": len(sentences),
        "shortest_tokens": min(outcome.lengths),
        "longest_tokens": max(outcome.lengths),
        "device": str(device),
        "threads": torch.get_num_threads(),
        **selection_json(selection),
        "batch_size": batch_size,
        "repeats": REPEATS,
        "runs": [{"name": run.name, "tokens": run.tokens, "seconds": run.seconds} for run in outcome.runs],
        "min_cosine": outcome.min_cosine,
        "required_cosine": REQUIRED_COSINE,
        "query": query,
        "nearest": [{"score": match.score, "sentence": sentences[match.index]} for match in outcome.matches],
    }


def _print(outcome: Outcome, sentences: Sequence[str], query: str, device: torch.device, batch_size: int) -> None:
    output.show(
        f"{NAME} over {len(sentences)} sentences of {TITLE},",
        f"of {min(outcome.lengths)} to {max(outcome.lengths)} tokens, in batches of {batch_size} "
        f"on {device} ({torch.get_num_threads()} CPU threads)",
        "",
        selection_facts(outcome.selection, "Attention"),
        "",
        candidates_table(outcome.selection),
        "",
        *_runs(outcome),
        "",
        _agreement(outcome),
        "",
        f"Nearest to {query!r}:",
        "",
        output.table(("Score", "Sentence"), [(f"{m.score:.3f}", sentences[m.index]) for m in outcome.matches]),
    )


def _runs(outcome: Outcome) -> tuple[RenderableType, ...]:
    packed = outcome.runs[0]
    rows = [
        (
            run.name,
            f"{run.tokens:>8,}  {run.tokens / packed.tokens:>5.2f}x",
            f"{run.seconds:>6.2f} s  {run.seconds / packed.seconds:>5.2f}x",
        )
        for run in outcome.runs
    ]
    note = f"Tokens include padding. The runs take turns batch by batch; a batch counts the median of {REPEATS}."
    return output.table(("Run", "Tokens computed", "Time"), rows), "", note


def _agreement(outcome: Outcome) -> Text:
    verdict, style = ("they agree", "green") if outcome.ok else ("WRONG: they differ", "bold red")
    return Text(
        f"Lowest cosine similarity of packed with padded: {outcome.min_cosine:.7f}, "
        f"required {REQUIRED_COSINE}: {verdict}.",
        style=style,
    )
