"""Packed and padded over the same sentences: tokens computed, time, and how alike the embeddings are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hal_attn.demo.encoder import PackedBatch, PackedEncoder
from hal_attn.demo.padded import PaddedModel, padded_tokens

Encode = Callable[[list[list[int]]], Tensor]
REQUIRED_COSINE = 0.99999


@dataclass(frozen=True)
class Run:
    """One way to embed the sentences.

    Attributes:
        name: "packed", "padded, same batches" or "padded, sorted by length".
        tokens: tokens that each layer computes, padding included.
        seconds: the time of all batches, each the median of its repeats.
        embeddings: `[N, hidden]` float32 unit vectors on the CPU, in the order of the sentences.
    """

    name: str
    tokens: int
    seconds: float
    embeddings: Tensor


@dataclass(frozen=True)
class _Route:
    """A way to embed: the batches as indices of sentences, what encodes one, and the tokens of one by its lengths."""

    name: str
    batches: list[list[int]]
    encode: Encode
    tokens: Callable[[Sequence[int]], int]


def count_steps(sentences: int, batch_size: int, repeats: int) -> int:
    """How many times `compare` calls `tick`."""
    return 3 * repeats * -(-sentences // batch_size)


def compare(
    encoder: PackedEncoder,
    model: PaddedModel,
    token_ids: Sequence[list[int]],
    device: torch.device,
    *,
    batch_size: int,
    repeats: int,
    tick: Callable[[], None],
) -> tuple[Run, ...]:
    """Embed all sentences packed, padded in the same batches, and padded in batches of like length.

    The routes take turns batch by batch, so that what else the machine does meets each of them alike.
    `tick` is called after each batch.
    """
    order = list(range(len(token_ids)))
    by_length = sorted(order, key=lambda index: -len(token_ids[index]))
    routes = (
        _Route("packed", _batches(order, batch_size), lambda ids: encoder(PackedBatch.of(ids, device)), sum),
        _Route("padded, same batches", _batches(order, batch_size), model, padded_tokens),
        _Route("padded, sorted by length", _batches(by_length, batch_size), model, padded_tokens),
    )
    timings: list[list[list[float]]] = [[[] for _ in route.batches] for route in routes]
    parts: list[list[Tensor]] = [[] for _ in routes]
    for repeat in range(repeats):
        for index in range(len(routes[0].batches)):
            for route, seconds, found in zip(routes, timings, parts, strict=True):
                ids = [token_ids[sentence] for sentence in route.batches[index]]
                begin = time.perf_counter()
                # The copy to the host waits for the device, so its work is in the time.
                embeddings = route.encode(ids).cpu()
                seconds[index].append(time.perf_counter() - begin)
                if repeat == 0:
                    found.append(embeddings)
                tick()
    return tuple(
        Run(
            route.name,
            sum(route.tokens([len(token_ids[index]) for index in batch]) for batch in route.batches),
            sum(map(statistics.median, seconds)),
            torch.cat(found)[torch.tensor([index for batch in route.batches for index in batch]).argsort()],
        )
        for route, seconds, found in zip(routes, timings, parts, strict=True)
    )


def min_cosine(runs: Sequence[Run]) -> float:
    """The lowest cosine similarity of any sentence's packed embedding with its embedding in each padded run."""
    packed = runs[0].embeddings.double()
    return min(float(F.cosine_similarity(packed, run.embeddings.double(), dim=-1).min()) for run in runs[1:])


def _batches(order: list[int], size: int) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]
