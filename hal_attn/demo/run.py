"""The demo from text to answer: load, tokenise, embed packed and padded, compare, search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import hal_attn
from hal_attn.demo.comparison import REQUIRED_COSINE, Run, compare, count_steps, min_cosine
from hal_attn.demo.encoder import PackedBatch, PackedEncoder
from hal_attn.demo.model import model_folder, tokenise
from hal_attn.demo.padded import PaddedModel
from hal_attn.demo.search import Match, nearest

REPEATS = 3


@dataclass(frozen=True)
class Outcome:
    """What one demo found.

    Attributes:
        lengths: tokens of each sentence.
        selection: what `hal_attn.explain` says about the first packed batch.
        runs: packed first, then the padded ones.
        min_cosine: the lowest similarity of a sentence's packed embedding with a padded one.
        matches: the sentences nearest to the query, the best first.
    """

    lengths: tuple[int, ...]
    selection: hal_attn.Selection
    runs: tuple[Run, ...]
    min_cosine: float
    matches: tuple[Match, ...]

    @property
    def ok(self) -> bool:
        """Whether packed and padded embeddings agree."""
        return self.min_cosine >= REQUIRED_COSINE


@torch.inference_mode()
def run_demo(
    sentences: Sequence[str],
    query: str,
    *,
    device: torch.device,
    backend: Sequence[str] | None,
    batch_size: int,
    top: int,
    progress: Callable[[str, int, int], None],
) -> Outcome:
    """Embed `sentences` packed and padded and find the `top` nearest to `query`.

    Args:
        progress: called with what is being done, how many steps of it are done, and how many it has.

    Raises:
        MissingExtraError: a package of the `demo` extra is not installed.
        UnsupportedAttentionError, BackendNotAvailableError, InvalidAttentionInputError: as `varlen_attention`.
    """
    progress("loading the packed encoder", 0, 1)
    folder = model_folder()
    encoder = PackedEncoder.from_folder(folder, device, None if backend is None else tuple(backend))
    token_ids, query_ids = tokenise(sentences, folder), tokenise([query], folder)
    selection = encoder.explain(PackedBatch.of(token_ids[:batch_size], device))
    # Before the slow part, so that a call that no backend takes says so at once.
    query_embedding = encoder(PackedBatch.of(query_ids, device))[0].cpu()
    progress("loading the padded model", 0, 1)
    model = PaddedModel(folder, device)
    steps, done = count_steps(len(sentences), batch_size, REPEATS), 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress("embedding, packed and padded in turns", done, steps)

    runs = compare(encoder, model, token_ids, device, batch_size=batch_size, repeats=REPEATS, tick=tick)
    lengths = tuple(len(ids) for ids in token_ids)
    matches = nearest(query_embedding, runs[0].embeddings, top)
    return Outcome(lengths, selection, runs, min_cosine(runs), matches)
