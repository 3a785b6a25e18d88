"""Small reports of each kind, as a file would have them, with figures that no machine measured."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from hal_attn.bench.dispatch import run as dispatch
from hal_attn.bench.kernels import row as kernels
from hal_attn.bench.packed import run as packed
from hal_attn.bench.problem import Problem
from hal_attn.bench.report import Report
from hal_attn.bench.sequence_parallel import row as sequence_parallel

FACTS = {
    "machine": "Linux x86_64, 2 CPU cores",
    "device": "cpu, a processor",
    "threads": "1 of PyTorch on the CPU",
    "ranks": "2, gloo, 1 CPU threads each",
    "versions": "hal_attn 0.1.0, python 3.11.7, torch 2.13.0",
    "settings": "none",
    "command": "hal-attn bench",
}
DENSE = Problem((4096,) * 4, False, 32, 8, 128, torch.bfloat16, True)
PACKED = Problem((300, 20, 1), True, 4, 4, 64, torch.bfloat16, False)


def of_dispatch() -> Report:
    rows = [
        dispatch.Row("bare", "one kernel", False, 8.0),
        dispatch.Row("attention", "one kernel", True, 11.5, "bare", 3.5, 2.0),
        dispatch.Row("peer", "one kernel", False, 9.0, "bare", 1.0),
    ]
    return Report("dispatch", "us", FACTS, tuple(map(asdict, rows)), ("diffusers: not installed",))


def of_kernels() -> Report:
    fast = kernels.Row(DENSE, "fast", kernels.FORWARD, ms=1.0, teraflops=500.0, vendor_ms=0.98, tuned=True, error=1e-3)
    slow = replace(
        fast, backend="slow", ms=1.25, teraflops=400.0, tuned=False, chosen=True, peak=1.2e9, vendor_peak=1e9
    )
    refused = kernels.Row(DENSE, "none", kernels.FORWARD, refused="dtype: bfloat16", tuned=False)
    other = replace(fast, problem=PACKED, chosen=True)
    return Report("kernels", "ms", FACTS, tuple(map(kernels.as_json, (fast, slow, refused, other))))


def of_packed() -> Report:
    best = packed.Row("skewed: one call", False, "skewed", "one call", "some", 3, 321, 4.0, 1.0, 2e6, 0.0)
    ours = replace(best, key="skewed: padded route", ours=True, way="padded route", ms=5.0, of_best=1.25)
    failed = replace(best, key="skewed: other", way="other", ms=None, of_best=None, peak=None, refused="failed: why")
    return Report("packed", "ms", FACTS, tuple(map(asdict, (ours, best, failed))))


def of_sequence_parallel() -> Report:
    local = sequence_parallel.Row(DENSE, "local", False, "some", "forward", ms=8.0)
    ring = replace(local, name="ring", ms=5.0, ideal=0.8, sent=2e6, least=1e6, error=1e-3)
    return Report("sequence-parallel", "ms", FACTS, tuple(map(sequence_parallel.as_json, (local, ring))))


ALL = {
    "dispatch": of_dispatch,
    "kernels": of_kernels,
    "packed": of_packed,
    "sequence-parallel": of_sequence_parallel,
}
