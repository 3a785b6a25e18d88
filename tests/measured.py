"""What was measured on an H200, from docs/data: TFLOP/s of each backend by a shape's key, and the shape as a request.

The files are of `hal-attn bench kernels --json`; other runs take their place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hal_attn import AttentionRequest

FOLDER = Path(__file__).parents[1] / "docs" / "data"
FILES = [FOLDER / f"h200-kernels{part}.json" for part in ("", "-more", "-gradients")]
# The shapes of the table in docs/performance.md, forward, bfloat16.
SHAPES = {
    "batched 16 of 1024 H16/16 D128 causal",
    "batched 4 of 4096 H16/16 D128 causal",
    "batched 1 of 16384 H16/16 D128 causal",
    "batched 1 of 16384 H16/16 D128 full",
    "batched 4 of 4096 H32/8 D128 causal",
    "batched 4 of 4096 H32/32 D64 full",
    "batched 2 of 8192 H16/16 D64 causal",
    "packed 10 of 16384 H16/16 D128 full",
    "packed 10 of 16384 H32/8 D128 causal",
    "packed 20 of 1500 H16/16 D64 full",
}


def _key(row: Mapping[str, Any]) -> str:
    about = row["problem"]
    kind = "packed" if about["packed"] else "batched"
    band = "causal" if about["causal"] else "full"
    sizes = f"{len(about['lengths'])} of {max(about['lengths'])}"
    return f"{kind} {sizes} H{about['heads']}/{about['kv_heads']} D{about['head_dim']} {band} {row['passes']}"


# Forward passes that were measured again beside their gradients stay out: what is compared is of one run.
_ROWS = [
    row
    for file in FILES
    for row in json.loads(file.read_text())["rows"]
    if row["teraflops"] and not row["wrong"] and (row["passes"] == "forward") == ("gradients" not in file.name)
]
_PROBLEMS = {_key(row): row["problem"] for row in _ROWS}
H200: dict[str, dict[str, float]] = {
    key: {row["backend"]: row["teraflops"] for row in _ROWS if _key(row) == key} for key in _PROBLEMS
}


def request_of(key: str) -> AttentionRequest:
    """The request of a measured shape."""
    about = _PROBLEMS[key]
    lengths = about["lengths"]
    return AttentionRequest(
        packed=about["packed"],
        device=torch.device("cuda", 0),
        dtype=getattr(torch, about["dtype"]),
        batch=len(lengths),
        seqlen_q=max(lengths),
        seqlen_k=max(lengths),
        tokens_q=sum(lengths),
        tokens_k=sum(lengths),
        heads=about["heads"],
        kv_heads=about["kv_heads"],
        head_dim=about["head_dim"],
        value_head_dim=about["head_dim"],
        uniform=len(set(lengths)) == 1,
        causal=about["causal"],
        needs_grad=not key.endswith(" forward"),
    )
