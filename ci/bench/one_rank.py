"""What each rank of a sequence-parallel plan takes when nothing keeps it waiting: for machines with one NVIDIA GPU.

torchrun --nproc-per-node=2 ci/bench/one_rank.py [--tokens 16384,65536] [--modes ring,ulysses] [--backend NAME]

Every rank is on the same GPU and has it alone in its turn. What it would write to another GPU it writes to its own
memory, by the same calls, and what it would wait for is there already: the kernels, the joins and the host's part are
real, the link and the other ranks' lateness are not, and the values are wrong. Prints for each rank the milliseconds of
a layer of many in a row and of its host, and what part half (a third ...) of one GPU's time is of the slowest rank's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hal_attn import attention, varlen_attention
from hal_attn.bench.problem import Problem, mixed_lengths, problems
from hal_attn.bench.sequence_parallel.contenders import Mode, make_modes, parse_modes
from hal_attn.sequence_parallel import driver, peers, slots

_SAMPLES, _SECONDS, _LEAST = 5, 0.05, 8
_HEADS, _DIM = 24, 128


@dataclass(frozen=True)
class Times:
    """Milliseconds of a layer, of many in a row, and of its host where the device has nothing to do before."""

    layer: float
    host: float


def looped_back() -> Any:
    """Within, ranks map their own memory as that of the others, and every flag is reached."""

    def mapped(group: dist.ProcessGroup, size: int, device: torch.device, count: int) -> tuple[list[Tensor], None]:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        memory[: slots.flags_size(dist.get_world_size(group))].view(torch.int32).fill_(slots.as_int32(count))
        torch.cuda.synchronize()
        return [memory] * dist.get_world_size(group), None

    def wait(stream: torch.cuda.Stream, flag: int, number: int) -> None:
        driver.wait(stream, flag, number - (1 << 30))

    return mock.patch.multiple(peers, mapped=mapped, wait=wait, obstacle=lambda group, device: None)


def measured(call: Callable[[], object]) -> Times:
    """Of a call, made so often that it takes a while."""
    for _ in range(_LEAST):
        call()
    count = max(_LEAST, int(_SECONDS * 1e3 / _timed(call, _LEAST).layer))
    return Times(
        statistics.median(_timed(call, count).layer for _ in range(_SAMPLES)),
        statistics.median(_timed(call, _LEAST).host for _ in range(_SAMPLES)),
    )


def _timed(call: Callable[[], object], count: int) -> Times:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    given = time.perf_counter() - begin
    torch.cuda.synchronize()
    return Times((time.perf_counter() - begin) / count * 1e3, given / count * 1e3)


def in_turn(call: Callable[[], object]) -> list[Times]:
    """`measured` on each rank while the others do nothing; of all ranks."""
    found: list[Times] = []
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            found.append(measured(call))
    told: list[list[Times]] = [found] * dist.get_world_size()
    dist.all_gather_object(told, found)
    return [times for each in told for times in each]


def whole(problem: Problem, backend: str) -> Callable[[Tensor, Tensor, Tensor], object]:
    """One GPU's call of a problem."""
    if not problem.packed:
        return partial(attention, causal=problem.causal, backend=backend)
    sequences = problem.sequences(torch.device("cuda", 0))
    return partial(varlen_attention, sequences=sequences, causal=problem.causal, backend=backend)


def lines(problem: Problem, modes: list[Mode], backend: str) -> None:
    """Print a line for one GPU, and one for each mode."""
    device, first = torch.device("cuda", 0), dist.get_rank() == 0
    tensors = problem.tensors(device)
    attend = whole(problem, backend)
    alone = min(times.layer for times in in_turn(lambda: attend(*tensors[:3])))
    if first:
        print(f"\n{problem.describe()}\n  {'one GPU':18s} {alone:8.3f} ms")
    for mode in modes:
        if (why := mode.refusal(problem, False)) is not None:
            if first:
                print(f"  {mode.name:18s} {why}")
            continue
        with mode.opened(problem, tensors, [backend]) as running:
            local = running.shard(tensors[0]), running.shard_kv(tensors[1]), running.shard_kv(tensors[2])
            # The first call of a plan is made by all ranks together.
            running.attend(*local)
            found = in_turn(lambda: running.attend(*local))  # noqa: B023 - it is over before the next one
        if first:
            part = alone / dist.get_world_size() / max(times.layer for times in found)
            each = "   ".join(f"{times.layer:7.3f} ({times.host:.3f})" for times in found)
            print(f"  {mode.name:18s} {part:.3f} of the ideal; ms a layer (of the host), by rank: {each}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="16384,65536")
    parser.add_argument("--modes", default="ring,kv_gather,kv_gather cut,ulysses")
    parser.add_argument("--backend", default="flash_attn_3")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.version.hip is not None:
        sys.exit("one_rank.py: no NVIDIA GPU here; ci/bench/sequence_parallel.py measures real ranks on any device")
    sizes = [int(tokens) for tokens in arguments.tokens.split(",")]
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    with torch.no_grad(), looped_back():
        modes = make_modes(parse_modes(arguments.modes), dist.get_world_size())
        packed = [mixed_lengths(tokens) for tokens in sizes]
        for problem in problems(sizes, packed, (False, True), _HEADS, _HEADS, _DIM, torch.bfloat16):
            lines(problem, modes, arguments.backend)
        del modes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
