"""One batch in a process of its own, so that its peak memory is its own: `python -m hal_attn.bench.packed.cell JSON`.

It prints JSON: the time of every way, taken in turns, or the memory of one. A device's allocator counts each call by
itself, so there the process of the times tells the memory too.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hal_attn.bench import timing
from hal_attn.bench.packed.ways import WAYS, Batch, call_of, exact
from hal_attn.bench.timing import Rounds
from hal_attn.errors import HalAttnError, shortened
from hal_attn.guard import attempt


@dataclass(frozen=True)
class Cell:
    """What a process measures: the time of all ways, on a device also their `memory`, or the memory of `way`."""

    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: str
    device: str
    backend: str | None
    threads: int
    rounds: Rounds
    memory: bool = True
    way: str | None = None

    def batch(self) -> Batch:
        """Its batch."""
        dtype, device = getattr(torch, self.dtype), torch.device(self.device)
        return Batch(self.lengths, self.heads, self.head_dim, dtype, device, self.backend)


def in_process(cell: Cell) -> dict[str, Any]:
    """What `measured` gives, from a process of its own.

    Raises:
        HalAttnError: the process failed; with the last line that it said.
    """
    command = [sys.executable, "-m", __name__, json.dumps(asdict(cell))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise HalAttnError(f"a batch could not be measured: {shortened(said, 300)}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(cell: Cell) -> dict[str, Any]:
    """Of all ways, by name: {"ms", "difference"}, on a device also "peak", or {"failed"}, with the backend's name; or
    {"peak"} of one."""
    torch.set_num_threads(cell.threads)
    batch = cell.batch()
    with torch.no_grad(), batch.kernel():
        if cell.way is not None:
            return {"peak": _peak(batch, cell.way)}
    with torch.no_grad():
        truth = exact(batch)
    with torch.no_grad(), batch.kernel():
        found: dict[str, Any] = {}
        for way, run in WAYS.items():
            output, failure = attempt(partial(run, batch), None)
            if output is None:
                found[way] = {"failed": shortened(failure, 200)}
            else:
                found[way] = {"difference": float((output.float() - truth).abs().max())}
                if cell.memory and batch.device.type != "cpu":
                    # A second batch beside the first: where it has no room, only the figure is missing.
                    found[way]["peak"], _ = attempt(partial(_peak, cell.batch(), way), None)
        calls = {way: call_of(batch, way) for way in WAYS if "failed" not in found[way]}
        for way, samples in timing.interleaved(batch.device, calls, cell.rounds).items():
            found[way]["ms"] = statistics.median(samples)
    return {"backend": batch.chosen.name, "batched_only": batch.batched_only, "ways": found}


def _peak(batch: Batch, way: str) -> float:
    """Bytes that the first call holds beyond its inputs; on the CPU, by which the process's own peak grows."""
    small = Batch((8,), batch.heads, batch.head_dim, batch.dtype, batch.device, batch.backend)
    WAYS[way](small)
    query, _, _ = batch.tensors
    _ = batch.sequences, batch.chosen
    if query.device.type != "cpu":
        return float(timing.peak_bytes(query.device, call_of(batch, way)))
    before = _most_resident()
    WAYS[way](batch)
    return float(_most_resident() - before)


def _most_resident() -> int:
    """The most bytes that this process held so far."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        # Not ru_maxrss: a process starts with that of the one that started it.
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _main() -> None:
    given = json.loads(sys.argv[1])
    rounds, lengths = Rounds(**given.pop("rounds")), tuple(given.pop("lengths"))
    print(json.dumps(measured(Cell(lengths=lengths, rounds=rounds, **given))))


if __name__ == "__main__":
    _main()
