"""Offsets reach devices that have no pinned memory of their own."""

import torch

from hal_attn import PackedSequences
from hal_attn.transfer import to_device


def test_a_device_without_pinned_memory(monkeypatch):
    def pin_memory(self):
        raise NotImplementedError("implement getPinnedMemoryAllocator")

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    offsets, offsets_k = PackedSequences.from_lengths([3, 2], [1, 4]).offsets(torch.device("meta"))
    assert (offsets.device.type, offsets_k.device.type) == ("meta", "meta")
    assert (tuple(offsets.shape), offsets.dtype) == ((3,), torch.int32)


def test_what_is_on_the_cpu_stays():
    tensor = torch.ones(3)
    assert to_device(tensor, torch.device("cpu")) is tensor
