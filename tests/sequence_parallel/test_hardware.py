"""On a real device: a layer never waits for it, and copies between two of them are right."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hal_attn.sequence_parallel import SequenceParallelGroups, fused
from hal_attn.sequence_parallel.partial import PartialStates
from hal_attn.sequence_parallel.work import RowSet
from tests.support import randn

ONE_RANK = str(Path(__file__).parents[2] / "ci" / "bench" / "one_rank.py")
LENGTHS = (700, 1, 64, 1300, 5)


def inputs(heads, kv_heads):
    tokens = sum(LENGTHS)
    return [
        randn(tokens, n, 128, seed=seed, dtype=torch.bfloat16).cuda().requires_grad_()
        for seed, n in enumerate((heads, kv_heads, kv_heads))
    ]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (100, 0)},
        {"causal": True, "replicated_prefix": [20, 1, 8, 0, 2], "key_prefix": 0},
    ],
    ids=["causal", "window", "replicated"],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (12, 4)])
def test_a_layer_never_waits_for_the_device(options, heads, kv_heads):
    plan = SequenceParallelGroups.create().plan(LENGTHS, **options)
    tensors = inputs(heads, kv_heads)
    weight = torch.ones(sum(LENGTHS), heads, 128, device="cuda", dtype=torch.bfloat16)

    def layer():
        output = plan.attention(*tensors)
        return output, torch.autograd.grad(output, tensors, weight)

    first = layer()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(second, first)


ROWS = {
    "all": RowSet(300),
    "slice": RowSet(170, 60),
    "index": RowSet(5, None, torch.tensor([299, 0, 7, 6, 150])),
    "none": RowSet(0, None, torch.zeros(0, dtype=torch.int64)),
}


@pytest.mark.cuda
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [8, 72, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fused_join_is_the_plain_one(monkeypatch, rows, dim, dtype):
    taken = ROWS[rows]
    first, part = randn(300, 3, dim, seed=1, dtype=dtype), randn(taken.count, 3, dim, seed=2, dtype=dtype)
    lse, part_lse = randn(3, 300, seed=3) * 20, randn(3, taken.count, seed=4) * 20
    lse[:, 100:120], part_lse[1, : taken.count // 2] = -torch.inf, -torch.inf
    first[100:120] = 0

    def joined(device):
        states = PartialStates(300, 3, dim, torch.device(device), dtype)
        states.add(ROWS["all"], first.to(device, copy=True), lse.to(device, copy=True))
        with monkeypatch.context() as patch:
            if device == "cuda":
                patch.setattr(PartialStates, "_join_plainly", None)
            states.add(taken, part.to(device), part_lse.to(device))
        return states.output.cpu(), states.lse.cpu()

    torch.testing.assert_close(joined("cuda"), joined("cpu"))


@pytest.mark.cuda
def test_what_a_part_without_weight_holds_does_not_matter():
    output, lse = randn(64, 2, 64, seed=1).cuda(), randn(2, 64, seed=2).cuda()
    before = output.clone(), lse.clone()
    part, part_lse = torch.full_like(output, torch.nan), torch.full_like(lse, -torch.inf)
    assert fused.takes(output, lse, part, part_lse)
    fused.join(output, lse, RowSet(64), part, part_lse)
    torch.testing.assert_close((output, lse), before)


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [1, 64, 128])
def test_no_part_is_joined_twice(dim):
    """Each thread of the kernel must have read a row before any writes it: with many rows, a race shows itself."""
    rows = RowSet(20000, None, torch.randperm(40000)[:20000].sort().values)
    output, lse = randn(40000, 12, dim, seed=1).cuda(), randn(12, 40000, seed=2).cuda()
    part, part_lse = randn(20000, 12, dim, seed=3).cuda(), randn(12, 20000, seed=4).cuda()

    def joined():
        own, own_lse = output.clone(), lse.clone()
        fused.join(own, own_lse, rows, part, part_lse)
        return own, own_lse

    first = joined()
    plain = PartialStates(40000, 12, dim, output.device, torch.float32)
    plain.add(RowSet(40000), output.clone(), lse.clone())
    plain._join_plainly(plain._output, plain._lse, rows, part, part_lse)
    torch.testing.assert_close(first, (plain.output, plain.lse))
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(joined(), first, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["ring", "kv_gather", "ulysses"])
def test_what_copy_engines_send_is_what_nccl_sends(mode):
    """On two GPUs; on one, both ranks share it, and the copies must see that."""
    assert torch.cuda.is_available(), "these tests were asked for, and there is no NVIDIA device"
    script = "tests.sequence_parallel.copies_on_gpus"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", script, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = "refused, several ranks share a GPU" if torch.cuda.device_count() == 1 else "as by NCCL"
    assert f"{mode}: {expected}" in done.stdout


@pytest.mark.cuda
def test_each_rank_alone_on_one_gpu():
    """`ci/bench/one_rank.py`: the ways by copies end where nobody else is there, and are timed."""
    assert torch.cuda.is_available(), "these tests were asked for, and there is no NVIDIA device"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", ONE_RANK]
    command += ["--tokens", "2048", "--modes", "ring,kv_gather,ulysses", "--backend", "torch_flash"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("of the ideal; ms a layer") == 4 * 3
