"""torchrun --nproc-per-node=4 docs/examples/sequence_parallel.py: attention over sequences that four ranks share."""

import torch
import torch.distributed as dist

from hal_attn import PackedSequences, varlen_attention
from hal_attn.sequence_parallel import SequenceParallelGroups

dist.init_process_group("gloo")  # nccl on GPUs, hccl on Ascend
groups = SequenceParallelGroups.create(ulysses=2, ring=dist.get_world_size() // 2)  # every rank calls it, alike

lengths = [96, 17, 40]  # tokens of each sequence, known on the host
torch.manual_seed(0)
query, key, value = (torch.randn(sum(lengths), 8, 16) for _ in range(3))

plan = groups.plan(lengths=lengths, causal=True)  # once for each batch shape; every layer runs it
q, k, v = plan.shard(query), plan.shard_kv(key), plan.shard_kv(value)
output = plan.attention(q, k, v)  # this rank's rows
whole = plan.gather(output)

alone = varlen_attention(query, key, value, sequences=PackedSequences.from_lengths(lengths), causal=True)
if groups.rank == 0:
    print(plan)
    print(f"largest difference from one process: {(whole - alone).abs().max().item():.1e}")
del groups, plan  # they keep the process groups, which must be gone before the interpreter exits
dist.destroy_process_group()
