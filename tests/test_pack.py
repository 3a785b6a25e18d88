"""`pack` and `unpack`: the rows of each sequence, and nothing else."""

import torch

from hal_attn import pack, unpack


def test_pack_keeps_the_first_rows_of_each_sequence():
    padded = torch.arange(12.0).reshape(2, 3, 2)
    assert torch.equal(pack(padded, [1, 3]), torch.cat([padded[0, :1], padded[1]]))
    assert pack(padded, [0, 0]).shape == (0, 2)


def test_unpack_pads_behind():
    rows = torch.arange(8.0).reshape(4, 2)
    padded = unpack(rows, [1, 0, 3], padding=-1.0)
    assert padded.shape == (3, 3, 2)
    assert torch.equal(padded[0], torch.tensor([[0.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]]))
    assert torch.equal(padded[1], torch.full((3, 2), -1.0))
    assert torch.equal(pack(padded, [1, 0, 3]), rows)
