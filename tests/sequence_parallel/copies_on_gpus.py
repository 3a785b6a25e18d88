"""Keys by copy engines between two GPUs: outputs as by NCCL, bit for bit, and gradients, whatever came before.

torchrun --nproc-per-node=2 -m tests.sequence_parallel.copies_on_gpus [MODE ...]

Where there is one GPU, both ranks have it, and the copies must say so. Prints what it saw, and of a layer of 512 tokens
the time, which is the host's.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hal_attn.sequence_parallel import SequenceParallelGroups, engine

HEADS, DIM, LAYERS = 8, 64, 7
BATCHES = ((96, 5, 32), (4096,), (7, 1), (300, 2000, 64, 1), (96, 5, 32))


def tensors(lengths, seed, device):
    generator = torch.Generator(device).manual_seed(seed)
    made = torch.randn(3, sum(lengths), HEADS, DIM, generator=generator, device=device)
    return list(made.to(torch.bfloat16).unbind())


def layers(plan, lengths, device, gradients):
    """Outputs, or gradients, of layers with other values each, given to the device without a pause."""
    found = []
    for seed in range(LAYERS):
        local = [shard(t) for shard, t in zip(_shards(plan), tensors(lengths, 10 * seed, device), strict=True)]
        # What is not dense has to be made so before an engine copies it.
        local[1] = torch.stack([local[1], local[1]], 1)[:, 1]
        if gradients:
            local = [tensor.requires_grad_() for tensor in local]
            output = plan.attention(*local)
            found += torch.autograd.grad(output, local, torch.ones_like(output))
        else:
            found.append(plan.attention(*local))
    return found


def _shards(plan):
    return plan.shard, plan.shard_kv, plan.shard_kv


def check_same(by_copies, by_nccl, device):
    for lengths in BATCHES:
        for causal in (False, True):
            plans = [groups.plan(lengths, causal=causal) for groups in (by_copies, by_nccl)]
            for gradients in (False, True):
                what = f"{lengths}, causal={causal}, gradients={gradients}"
                found, expected = (layers(plan, lengths, device, gradients) for plan in plans)
                for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                    # Vendors' gradients are added up in any order; those of other keys would be other ones altogether.
                    most = theirs.abs().max().item() * 2**-6 if gradients else 0.0
                    off = (ours - theirs).abs().max().item()
                    assert off <= most, f"{what}, tensor {place}: {off} from NCCL's"


def check_another_current_device(by_copies, by_nccl, device):
    """The tensors say which GPU it is, whichever is the current one. What ranks compare first, they compare before:
    NCCL's own collectives of objects go by the current device."""
    lengths = (1000,)
    expected = layers(by_nccl.plan(lengths, causal=True), lengths, device, False)
    plan = by_copies.plan(lengths, causal=True)
    layers(plan, lengths, device, False)
    torch.cuda.set_device(1 - device.index)
    try:
        found = layers(plan, lengths, device, False)
    finally:
        torch.cuda.set_device(device)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), "another device was current"


def check_interrupted(mode, device):
    """What raises on every rank between sending and reading leaves nobody waiting; later calls go by NCCL."""
    groups = SequenceParallelGroups.create(**{mode: 2}, peer_copies=True)
    plan = groups.plan((300, 5))
    expected = layers(plan, (300, 5), device, False)
    # At the first results, when keys or the next heads are under way.
    planted = mock.patch.object(engine.PartialStates, "add", side_effect=RuntimeError("planted"))
    with planted, pytest.raises(RuntimeError, match="planted"):
        layers(plan, (300, 5), device, False)
    assert way(groups).unavailable == "an exchange was interrupted by an exception"
    found = layers(plan, (300, 5), device, False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def host_time(groups, device, causal):
    """Microseconds of a layer that is too short for the device to matter."""
    plan = groups.plan((512,), causal=causal)
    local = [shard(t) for shard, t in zip(_shards(plan), tensors((512,), 0, device), strict=True)]
    with torch.no_grad():
        for _ in range(20):
            plan.attention(*local)
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(300):
            plan.attention(*local)
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / 300 * 1e6


def way(groups):
    return groups.peers if groups.peers is not None else groups.peers_of_heads


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def main():
    # A rank that waits for ever says where.
    faulthandler.dump_traceback_later(150, exit=True)
    rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo" if count == 1 else "nccl")
    try:
        for mode in sys.argv[1:] or ("ring", "kv_gather", "ulysses"):
            check_mode(mode, device, alone=count == 1)
    finally:
        dist.destroy_process_group()


def check_mode(mode, device, alone):
    by_copies = SequenceParallelGroups.create(**{mode: 2}, peer_copies=True)
    if alone:
        assert not way(by_copies).take(tensors((64,), 0, device))
        assert way(by_copies).unavailable == "several ranks share a GPU", way(by_copies).unavailable
        return say(f"{mode}: refused, several ranks share a GPU")
    # First in inference mode, whose tensors would be of no use outside it.
    with torch.inference_mode():
        layers(by_copies.plan((64,)), (64,), device, False)
    assert way(by_copies).unavailable is None, way(by_copies).unavailable
    by_nccl = SequenceParallelGroups.create(**{mode: 2})
    check_same(by_copies, by_nccl, device)
    check_another_current_device(by_copies, by_nccl, device)
    assert way(by_copies).unavailable is None, way(by_copies).unavailable
    check_interrupted(mode, device)
    times = [host_time(groups, device, causal) for groups in (by_copies, by_nccl) for causal in (False, True)]
    told = ", ".join(f"{time:.0f}" for time in times)
    return say(f"{mode}: as by NCCL; host, us a layer, full and causal, by copies, then by NCCL: {told}")


if __name__ == "__main__":
    main()
