"""On a real device: a layer never waits for it."""

import pytest
import torch

from hal_attn.sequence_parallel import SequenceParallelGroups
from tests.support import randn

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
