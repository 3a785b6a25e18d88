"""Sequence parallelism on the GPUs of one host, all in one run: right, how fast, what travels, and what it hides.

torchrun --nproc-per-node=2 ci/bench/sequence_parallel.py FOLDER [--quick] [--backend NAME]

Writes results.json, results.png (with matplotlib), and of one ring layer ring_trace.json (for Perfetto) and
ring_trace.png to FOLDER; prints all tables, and last a summary of under 8,000 characters. Exit status 1 where a mode
is wrong, or makes the host wait for the device. On the CPU the same on small problems, without the profile.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import torch

from hal_attn.bench.problem import Problem, mixed_lengths, problems
from hal_attn.bench.sequence_parallel.contenders import make_modes
from hal_attn.bench.sequence_parallel.effort import Effort
from hal_attn.bench.sequence_parallel.measure import FASTEST, Bench
from hal_attn.bench.sequence_parallel.overlap import Overlap, intervals, overlap
from hal_attn.bench.sequence_parallel.plot import plot, plot_timeline
from hal_attn.bench.sequence_parallel.ranks import Ranks, joined
from hal_attn.bench.sequence_parallel.row import BOTH, FORWARD, LOCAL, Row
from hal_attn.bench.sequence_parallel.run import Result, Wanted, measure
from hal_attn.bench.sequence_parallel.table import LEGEND, tables
from hal_attn.bench.timing import synchronise, trace
from hal_attn.cli import output

MODES = ("ulysses", "ring", "kv_gather", "kv_gather cut", "ulysses x ring")
# By (tokens, packed, causal): the part of the ideal that is to be reached.
MARKS = {
    (65536, False, False): 0.95,
    (65536, False, True): 0.92,
    (65536, True, False): 0.90,
    (65536, True, True): 0.90,
    (16384, False, False): 0.85,
    (16384, False, True): 0.85,
}
PLOTTED = find_spec("matplotlib") is not None


def wanted(device: torch.device, quick: bool, backend: str) -> list[Wanted]:
    """Speed, size by size; then gradients; then float32 with gradients, on problems that one device does in a moment.

    A sample is many layers in a row, about 0.2 s, as in a model: the first one waits for the host and for the slower
    rank. With gradients a layer is a forward and a backward pass, 12 in a row; of float32, where speed is nobody's
    claim, one.
    """
    if device.type == "cpu":
        sizes, small, heads, dim, dtype = (512,), 256, 4, 32, torch.float32
    else:
        sizes, small, heads, dim, dtype = (16384, 65536, 131072), 8192, 24, 128, torch.bfloat16
    if quick:
        sizes = sizes[:2]

    def all_of(tokens: Sequence[int], dtype: torch.dtype) -> list[Problem]:
        packed = [mixed_lengths(count) for count in tokens]
        return problems(tokens, packed, (False, True), heads, heads, dim, dtype)

    speed = [
        Wanted(
            all_of((size,), dtype),
            MODES,
            backend,
            False,
            True,
            Effort(2 if size > 100_000 else 3 if quick else 5, 3, seconds=0.2),
        )
        for size in sizes
    ]
    if device.type == "cpu":
        speed = [replace(part, effort=Effort(3, 4)) for part in speed]
    layers = 4 if device.type == "cpu" else 12
    gradients = replace(speed[0], problems=all_of((small,), dtype), backward=True, effort=Effort(3, layers))
    exact = replace(gradients, problems=all_of((small // 2,), torch.float32), backend=None, peers=False)
    exact = replace(exact, effort=Effort(3, 1, 1))
    return [*speed, gradients, exact]


def _speed(device: torch.device) -> list[Problem]:
    """The problems that `--quick` keeps."""
    return [problem for part in wanted(device, True, "")[:-2] for problem in part.problems]


def profile_ring(ranks: Ranks, problem: Problem, backend: str, folder: Path) -> Overlap | None:
    """How much of the exchange of ring layers in a row the kernels hide on rank 0; trace and picture in `folder`."""
    mode = make_modes(["ring"], ranks.size)[0]
    if ranks.device.type == "cpu" or mode.groups is None:
        return None
    bench = Bench(ranks, problem, Effort(1, 1), backend)
    query, key, value, _ = bench.tensors
    with mode.opened(problem, bench.tensors, bench.backends(FORWARD)) as running, torch.no_grad():
        local = running.shard(query), running.shard_kv(key), running.shard_kv(value)

        def layers() -> None:
            # The first waits for the host, as no layer of a model does but its first.
            for _ in range(4):
                running.attend(*local)
            synchronise(ranks.device)

        for _ in range(3):
            layers()
        ranks.meet()
        events = trace(layers, keep=folder / "ring_trace.json" if ranks.first else None)
    if ranks.first and PLOTTED:
        plot_timeline(*intervals(events), f"four ring layers, rank 0: {problem.describe()}", folder / "ring_trace.png")
    return overlap(events)


def summary(result: Result, found: Overlap | None) -> Iterator[str]:
    """What the tables say, a line a problem."""
    for passes in (FORWARD, BOTH):
        yield f"\n{passes}: part of the ideal (mark: what is to be reached), and time of the best peer / of our best"
        names = f"{'ulysses':>7s} {'ring':>6s} {'gather':>6s} {'cut':>6s} {'usp':>6s}"
        yield f"{'problem':43s} {'TF/s':>6s} {'mark':>5s} {names}  peer"
        rows = [row for row in result.rows if row.passes == passes]
        for problem, group in groupby(rows, key=lambda row: row.problem):
            yield _speeds(problem, list(group))
    yield "\nMiB that a rank sends a layer, forward, and of how much the least is a part"
    for problem, group in groupby((row for row in result.rows if row.passes == FORWARD), key=lambda row: row.problem):
        sent = [(row.name, row.sent, row.least) for row in group if row.sent is not None and row.least]
        told = ", ".join(f"{name} {size / 2**20:.1f} ({size / (least or 1):.2f})" for name, size, least in sent)
        yield f"{_form(problem):33s} {told}"
    yield "\nlargest error against one rank, forward / with gradients; of the output against float32"
    ours = [row for row in result.rows if not row.peer and row.error is not None]
    for key in sorted({(str(row.problem.dtype), row.name) for row in ours}):
        same = [row for row in ours if (str(row.problem.dtype), row.name) == key]
        errors = [max((row.error or 0.0 for row in same if row.passes == p), default=0.0) for p in (FORWARD, BOTH)]
        exact = max(row.exact_error or 0.0 for row in same)
        yield f"{key[0].removeprefix('torch.'):9s} {key[1]:22s} {errors[0]:.1e} / {errors[1]:.1e}   {exact:.1e}"
    if torch.cuda.is_available():
        yield f"the host waits for the device {sum(row.host_waits or 0 for row in ours)} times in all layers"
    if found is not None:
        yield (
            f"four ring layers: {found.whole:.0f} us, kernels {found.computation:.0f}, transfers "
            f"{found.communication:.0f}, of which under kernels {found.hidden:.0f} ({found.part:.3f})"
        )


def _speeds(problem: Problem, rows: Sequence[Row]) -> str:
    local = next(row for row in rows if row.name == LOCAL)
    by_mode = {mode: row for row in rows for mode in MODES if re.fullmatch(rf"{mode}( \d+x\d+)?", row.name)}
    cells = ["WRONG" if row.wrong else _part(row.ideal) for row in (by_mode[mode] for mode in MODES)]
    ours, theirs = (
        min(((row.ms, row.name) for row in rows if row.ms and row.peer == peer and row is not local), default=None)
        for peer in (False, True)
    )
    peer = "-" if ours is None or theirs is None else f"{theirs[0] / ours[0]:.2f} {theirs[1]}"
    mark = MARKS.get((problem.tokens, problem.packed, problem.causal)) if local.passes == FORWARD else None
    return (
        f"{_form(problem) + ' ' + local.backend:43s} {local.teraflops or 0:6.1f} {_part(mark):>5s} {cells[0]:>7s} "
        f"{cells[1]:>6s} {cells[2]:>6s} {cells[3]:>6s} {cells[4]:>6s}  {peer}"
    )


def _form(problem: Problem) -> str:
    form, band = "packed" if problem.packed else "dense", "causal" if problem.causal else "full"
    return f"{form} {problem.tokens} {band} {str(problem.dtype).removeprefix('torch.')}"


def _part(part: float | None) -> str:
    return "-" if part is None else f"{part:.3f}".removesuffix("0")


def write(result: Result, found: Overlap | None, folder: Path) -> None:
    """results.json."""
    text = {**result.report().as_json(), "ring_overlap": None if found is None else asdict(found)}
    (folder / "results.json").write_text(json.dumps(text, indent=1) + "\n")


def _together(parts: Sequence[Result]) -> Result:
    return replace(parts[0], rows=tuple(row for part in parts for row in part.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="no 131,072 tokens, fewer samples")
    parser.add_argument("--backend", default=FASTEST, help="for one device and every mode")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    device = torch.device(arguments.device)
    with joined(device) as ranks:

        def tick(description: str, done: int, steps: int) -> None:
            if ranks.first:
                print(f"[{done}/{steps}] {description}", file=sys.stderr, flush=True)

        parts: list[Result] = []
        for part in wanted(ranks.device, arguments.quick, arguments.backend):
            parts.append(measure(ranks, part, tick))
            if ranks.first:
                # Kept as it comes: what a later part meets does not lose what was measured.
                write(_together(parts), None, arguments.folder)
        result = _together(parts)
        long = next(p for p in reversed(_speed(ranks.device)) if not (p.packed or p.causal))
        found = profile_ring(ranks, long, arguments.backend, arguments.folder)
        if ranks.first:
            write(result, found, arguments.folder)
            if PLOTTED:
                rows = [row for part in parts[:-2] for row in part.rows]
                plot(rows, ranks.size, result.facts["device"], arguments.folder / "results.png")
            output.show(output.fields(result.facts), "", *tables(result.rows), *result.missing, LEGEND)
            print("\n".join(summary(result, found)))
    sys.exit(0 if result.ok else 1)


if __name__ == "__main__":
    main()
