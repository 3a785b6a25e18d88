"""Packed batches on the CPU: the padded route against one call a sequence, one padded call, and buckets of like length.

python ci/bench/packed.py [--json]; each cell runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import hal_attn
from hal_attn import PackedSequences

HEADS, HEAD_DIM = 8, 64
ROUNDS = 9


def batches() -> dict[str, list[int]]:
    """The lengths of each batch."""
    generator = torch.Generator().manual_seed(0)
    tiny = torch.randint(1, 33, (1000,), generator=generator).tolist()
    mixed = torch.randint(4, 257, (128,), generator=generator).tolist()
    return {
        "skewed": [4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8],
        "equal": [256] * 32,
        "mixed": mixed,
        "tiny": tiny,
    }


def one_call_a_sequence(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([_sdpa(a[None], b[None], c[None])[0] for a, b, c in parts])


def one_padded_call(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    padded = [torch.nn.utils.rnn.pad_sequence(list(t.split(lengths)), batch_first=True) for t in (q, k, v)]
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    output = _sdpa(*padded, mask=mask[:, None, None])
    return output[mask]


def bucketed_calls(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Sequences whose lengths round up to the same power of two share a padded call."""
    parts = list(zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True))
    buckets: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        buckets.setdefault((length - 1).bit_length(), []).append(index)
    outputs: dict[int, Tensor] = {}
    for members in buckets.values():
        own = [lengths[index] for index in members]
        rows = one_padded_call(*(torch.cat([parts[index][t] for index in members]) for t in range(3)), own)
        outputs.update(zip(members, rows.split(own), strict=True))
    return torch.cat([outputs[index] for index in range(len(lengths))])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask).transpose(1, 2)


def measure(batch: str, method: str, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of one call (median), its peak memory beyond the inputs in MiB, and how far it is from the first."""
    lengths = batches()[batch]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(sum(lengths), HEADS, HEAD_DIM, generator=generator).to(dtype) for _ in range(3))
    sequences = PackedSequences.from_lengths(lengths)
    methods: dict[str, Callable[[], object]] = {
        "padded route": lambda: hal_attn.varlen_attention(q, k, v, sequences=sequences),
        "a call a sequence": lambda: one_call_a_sequence(q, k, v, lengths),
        "one padded call": lambda: one_padded_call(q, k, v, lengths),
        "length buckets": lambda: bucketed_calls(q, k, v, lengths),
    }
    run = methods[method]
    with torch.no_grad():
        _sdpa(q[None, :8], k[None, :8], v[None, :8])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        output = run()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        exact = one_call_a_sequence(q, k, v, lengths)
    assert isinstance(output, Tensor)
    difference = (output - exact).abs().max().item()
    return {"ms": statistics.median(times) * 1e3, "peak_mib": peak / 1024, "difference": difference}


METHODS = ("padded route", "a call a sequence", "one padded call", "length buckets")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--cell", nargs=2, metavar=("BATCH", "METHOD"), help="measure one cell in this process")
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(measure(*arguments.cell, getattr(torch, arguments.dtype))))
        return
    rows = []
    for batch, lengths in batches().items():
        for method in METHODS:
            command = [sys.executable, __file__, "--dtype", arguments.dtype, "--cell", batch, method]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append({"batch": batch, "sequences": len(lengths), "tokens": sum(lengths), "method": method, **found})
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    shape = f"{HEADS} heads of {HEAD_DIM}"
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.dtype}, {shape}")
    for row in rows:
        best = min(
            other["ms"] for other in rows if other["batch"] == row["batch"] and other["method"] != "padded route"
        )
        print(
            f"{row['batch']:8s} {row['sequences']:5d} sequences {row['tokens']:6d} tokens  {row['method']:18s} "
            f"{row['ms']:9.2f} ms  {row['ms'] / best:5.2f} of the best other  {row['peak_mib']:8.1f} MiB"
        )


if __name__ == "__main__":
    main()
