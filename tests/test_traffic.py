"""Bytes that a plan says it sends, against those really handed to torch.distributed by 2, 3 and 4 gloo ranks."""

import math
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from hal_attn.sequence_parallel import SequenceParallelGroups
from hal_attn.sequence_parallel.traffic import Share, Traffic, traffic

HEADS = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "value_head_dim": 4}
SIZES = (*HEADS.values(), 4)
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = {
    "dense": {"batch": 2, "seqlen": 13},
    "causal": {"lengths": [17, 1, 0, 9], "causal": True},
    "window": {"lengths": [24, 6], "causal": True, "window_size": (3, 0), "layout": "contiguous"},
    "replicated": {"lengths": [15, 8], "replicated_prefix": 2, "replicated_suffix": [1, 0], "key_prefix": 1},
}
DEGREES = {
    2: [{"ulysses": 2}, {"ring": 2}, {"kv_gather": 2}],
    3: [{"ulysses": 3}, {"ring": 3}, {"kv_gather": 3}],
    4: [{"ulysses": 2, "ring": 2}, {"ulysses": 2, "kv_gather": 2}],
}


class Counter:
    """Bytes that leave this rank through torch.distributed."""

    def __init__(self):
        self.sent = 0

    def _collective(self, name, leaving):
        original = getattr(dist, name)

        def call(*args, **kwargs):
            self.coordinate = dist.get_rank(kwargs["group"])
            self.sent += leaving(dist.get_world_size(kwargs["group"]), *args)
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    def _all_to_all(self, _, received, sent, receives, sends):
        return (sum(sends) - sends[self.coordinate]) * sent.element_size()

    def watching(self):
        stack = ExitStack()
        stack.enter_context(self._collective("all_to_all_single", self._all_to_all))
        stack.enter_context(self._collective("all_gather", lambda n, _, part: (n - 1) * size(part)))
        stack.enter_context(self._collective("all_reduce", lambda n, part: 2 * (n - 1) * size(part) // n))
        return stack


def size(tensor):
    return tensor.numel() * tensor.element_size()


def counted(plan, dtype):
    """(bytes forward, bytes with gradients), and what the plan says of both."""
    rows = ((plan.rows, 6, 8), (plan.rows_kv, 3, 8), (plan.rows_kv, 3, 4))
    batch = (-1,) if plan.description.batch is None else (plan.description.batch, -1)
    tensors = [torch.randn(r.count, h, d, dtype=dtype).view(*batch, h, d).requires_grad_() for r, h, d in rows]
    forward, backward = Counter(), Counter()
    plan.attention(*tensors)  # agree on a backend first
    with forward.watching():
        output = plan.attention(*tensors)
    with backward.watching():
        output.sum().backward()
    sizes = (*HEADS.values(), dtype.itemsize)
    predicted = [traffic(plan, *sizes, backward=wanted) for wanted in (False, True)]
    return (forward.sent, forward.sent + backward.sent), predicted


def run_rank(rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {}
    for degrees in DEGREES[ranks]:
        groups = SequenceParallelGroups.create(**degrees)
        for name, shape in SHAPES.items():
            plan = groups.plan(**shape, **HEADS)
            for dtype in DTYPES:
                key = (groups.mode, name) if dtype == torch.float32 else (groups.mode, name, str(dtype))
                found[key] = counted(plan, dtype)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=DEGREES)
def by_rank(request):
    """What each rank counted, and what its plans said."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(run_rank, (request.param, folder), nprocs=request.param)
        yield [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


def test_what_is_sent_is_what_the_plan_says(by_rank):
    for found in by_rank:
        for name, (counted, (forward, both)) in found.items():
            assert (name, forward.sent, both.sent) == (name, *counted)


def test_no_group_sends_less_than_the_least(by_rank):
    for name in by_rank[0]:
        for index in range(2):
            found = [rank[name][1][index] for rank in by_rank]
            assert sum(t.sent for t in found) >= sum(t.least for t in found) > 0, name


@pytest.mark.parametrize("by_rank", [3], indirect=True)
def test_a_gather_sends_the_least_and_a_ring_of_a_window_more(by_rank):
    def share(mode, shape):
        found = [rank[mode, shape][1][0] for rank in by_rank]
        return sum(t.sent for t in found) / sum(t.least for t in found)

    assert share("kv_gather", "dense") == share("kv_gather", "causal") == share("ring", "dense") == 1
    assert share("ring", "window") > 1


def test_one_rank_sends_nothing():
    plan = SequenceParallelGroups.create().plan(lengths=[5])
    assert traffic(plan, *SIZES, backward=True) == Traffic(())


def test_the_kinds_add_up():
    found = Traffic((Share("heads", 7, 5), Share("keys", 2, 2)))
    assert (found.sent, found.least) == (9, 7)
    assert math.isclose(found.sent / found.least, 9 / 7)
