"""The same values in other memory: strides, offsets and storage that inputs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from hal_attn.testing.tensors import Tensors

Layout = Callable[[Tensor, Tensor, Tensor], Tensors]


def _each(change: Callable[[Tensor], Tensor]) -> Layout:
    return lambda query, key, value: (change(query), change(key), change(value))


def _heads_first(tensor: Tensor) -> Tensor:
    """`[..., S, H, D]` that lies in memory as `[..., H, S, D]`."""
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


def _dim_first(tensor: Tensor) -> Tensor:
    """The head dim has a stride of more than 1."""
    return tensor.transpose(-1, -3).contiguous().transpose(-1, -3)


def _every_second_row(tensor: Tensor) -> Tensor:
    """Rows with unused ones, which hold NaN, between them."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-3).flatten(-4, -3)[..., ::2, :, :]


def _inside_of_more(tensor: Tensor) -> Tensor:
    """Rows, heads and dims inside a larger buffer that holds NaN around them."""
    wide = torch.nn.functional.pad(tensor, (8, 8, 1, 1, 3, 3), value=torch.nan)
    return wide[..., 3:-3, 1:-1, 8:-8]


def _odd_address(tensor: Tensor) -> Tensor:
    """A storage offset of one element: rows begin at addresses that no wide load can take."""
    flat = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])
    return flat[1:].view(tensor.shape)


def _one_buffer(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
    """Query, key and value as parts of one `[..., S, 3, H, D]`, as a fused projection gives them."""
    query, key, value = torch.stack([query, key, value], dim=-3).unbind(-3)
    return query, key, value


def _expanded_keys(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
    """Key and value of head 0, as a view with stride 0 over all heads."""
    return query, key[..., :1, :].expand_as(key), value[..., :1, :].expand_as(value)


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "heads before rows in memory": _each(_heads_first),
        "head dim not last in memory": _each(_dim_first),
        "every second row": _each(_every_second_row),
        "inside a larger buffer": _each(_inside_of_more),
        "odd address": _each(_odd_address),
        "one buffer for all three": _one_buffer,
        "heads with stride 0": _expanded_keys,
    }
)
