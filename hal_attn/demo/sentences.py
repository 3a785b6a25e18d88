"""The text of the demo: public-domain sentences of very different lengths (`data/README.md` says which)."""

from __future__ import annotations

from importlib import resources

TITLE = "Alice's Adventures in Wonderland"


def load_sentences(limit: int | None = None) -> tuple[str, ...]:
    """The sentences in the order of the book, or the first `limit` of them."""
    text = resources.files("hal_attn.demo").joinpath("data/alice.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines()[:limit])
