"""The batches that are measured, by name."""

from __future__ import annotations

import torch


def batches() -> dict[str, tuple[int, ...]]:
    """Lengths that differ much, not at all, somewhat, and hardly beside their number."""
    generator = torch.Generator().manual_seed(0)
    tiny = torch.randint(1, 33, (1000,), generator=generator).tolist()
    mixed = torch.randint(4, 257, (128,), generator=generator).tolist()
    return {
        "skewed": (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8),
        "equal": (256,) * 32,
        "mixed": tuple(mixed),
        "tiny": tuple(tiny),
    }


def quick_batches() -> dict[str, tuple[int, ...]]:
    """The same kinds, done in a moment."""
    return {"skewed": (256, 64, 16, 4), "equal": (64,) * 4, "mixed": (9, 33, 60, 21), "tiny": (3, 1, 4, 1, 5, 9, 2, 6)}
