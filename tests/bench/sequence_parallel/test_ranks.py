"""The process group of a measurement ends with it: a gloo thread that is left may abort a rank as it exits."""

import os
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from torch import multiprocessing

from hal_attn.bench.problem import problems
from hal_attn.bench.sequence_parallel.effort import Effort
from hal_attn.bench.sequence_parallel.ranks import joined
from hal_attn.bench.sequence_parallel.run import Wanted, measure

RANKS = 2


def run_rank(rank, folder):
    """Everything that a measurement does, and that keeps a group: plans, gradients, the profiler, peers."""
    torch.set_num_threads(1)
    wanted = Wanted(
        problems((16,), (), (False, True), 2, 2, 8, torch.float32),
        ("ulysses", "ring", "kv_gather"),
        None,
        True,
        True,
        Effort(1, 1, 1),
    )
    started = dist.init_process_group

    def init(backend, **options):
        started(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, **options)

    environ = {"WORLD_SIZE": str(RANKS), "RANK": str(rank)}
    patched = mock.patch.object(dist, "init_process_group", init)
    with mock.patch.dict(os.environ, environ), patched, joined(torch.device("cpu")) as ranks:
        rows = measure(ranks, wanted, lambda *_: None).rows
        groups = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
    assert groups
    assert any(row.peer for row in rows)
    assert all(row.ms for row in rows if not row.peer)
    assert [group() for group in groups] == [None] * len(groups)


def test_no_process_group_outlives_the_measurement(tmp_path):
    multiprocessing.spawn(run_rank, (tmp_path,), nprocs=RANKS)
