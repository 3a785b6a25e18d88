"""Exported programs hold the operators, and run as the calls do, in another length and after a round trip to a file."""

import io

import pytest
import torch

from hal_attn import attention, varlen_attention
from tests.compile.cases import packed


class Batched(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(64, 192)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 4, 16)).unbind(2)
        return attention(query, key, value, causal=True).flatten(2)


class Packed(torch.nn.Module):
    def forward(self, query, key, value, offsets):
        return varlen_attention(query, key, value, cu_seqlens=offsets, causal=True)


def through_a_file(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_batched_model(strict, monkeypatch):
    model = Batched()
    shapes = ({0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=512)},)
    program = torch.export.export(model, (torch.randn(2, 9, 64),), dynamic_shapes=shapes, strict=strict)
    assert [n.target for n in program.graph.nodes if "hal_attn" in str(n.target)] == [
        torch.ops.hal_attn.attention.default
    ]
    run, x = through_a_file(program), torch.randn(3, 17, 64)
    assert torch.equal(run(x), model(x))
    monkeypatch.setenv("HAL_ATTN_BACKEND", "cpu_math")
    assert torch.equal(run(x), model(x))


def test_a_packed_model():
    made, sequences, _, _ = packed("plain", [3, 4])
    rows = torch.export.Dim("rows", min=2, max=999)
    shapes = ({0: rows}, {0: rows}, {0: rows}, {0: torch.export.Dim("sequences", min=2, max=99)})
    program = torch.export.export(Packed(), (*made, sequences.cu_seqlens), dynamic_shapes=shapes)
    made, sequences, _, _ = packed("plain", [3, 1, 7])
    run = through_a_file(program)
    assert torch.equal(run(*made, sequences.cu_seqlens), Packed()(*made, sequences.cu_seqlens))
