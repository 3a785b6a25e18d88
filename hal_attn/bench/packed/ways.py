"""The ways to attend over packed sequences with a kernel that knows only batches: the padded route, and what anyone can
write by hand around the same kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hal_attn.backend import AttentionBackend
from hal_attn.bench.timing import Call
from hal_attn.errors import UnsupportedAttentionError
from hal_attn.functional import select_backend, varlen_attention
from hal_attn.packing import PackedSequences
from hal_attn.refusal import Refusal

ROUTE = "padded route"
# Backends whose kernel PyTorch's own function runs, with less around it than ours has, by the type of their device.
_OF_PYTORCH = {
    ("cpu_flash", "cpu"): SDPBackend.FLASH_ATTENTION,
    ("cpu_sdpa", "cpu"): None,
    ("torch_cudnn", "cuda"): SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Batch:
    """Packed sequences of these lengths, query, key and value `[T, H, D]`, for one backend."""

    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    backend: str | None

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same numbers each time."""
        generator = torch.Generator().manual_seed(1)
        shape = (sum(self.lengths), self.heads, self.head_dim)
        query, key, value = (
            torch.randn(shape, generator=generator).to(device=self.device, dtype=self.dtype) for _ in range(3)
        )
        return query, key, value

    @cached_property
    def sequences(self) -> PackedSequences:
        """Made once for a batch, as a model's layers share it."""
        return PackedSequences.from_lengths(list(self.lengths), device=self.device)

    @cached_property
    def chosen(self) -> AttentionBackend:
        """The backend.

        Raises:
            UnsupportedAttentionError, BackendNotAvailableError: it does not take the batch.
        """
        return select_backend(*self.tensors, sequences=self.sequences, backend=self.backend)

    @property
    def batched_only(self) -> bool:
        """Whether it has no packed kernel, so that the padded route serves it."""
        return not self.chosen.implements("forward_varlen")

    @property
    def _kernel_of(self) -> tuple[str, str]:
        return self.chosen.name, self.device.type

    def kernel(self) -> AbstractContextManager[object]:
        """What must hold while `attend` is called."""
        kind = _OF_PYTORCH.get(self._kernel_of)
        return nullcontext() if kind is None else sdpa_kernel(kind)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """The kernel itself, `[B, S, H, D]`; `mask` `[B, S]` marks the keys that count.

        Raises:
            UnsupportedAttentionError: a mask, which the kernel would not look at.
        """
        if mask is not None and not self.chosen.capabilities.key_padding_mask:
            refusal = Refusal("key_padding_mask", "given", "no mask over the keys")
            raise UnsupportedAttentionError(f"{self.chosen.name} has no mask", [(self.chosen.name, (refusal,))])
        if self._kernel_of in _OF_PYTORCH:
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
            hidden = None if mask is None else mask[:, None, None]
            return F.scaled_dot_product_attention(query, key, value, hidden).transpose(1, 2)
        given = {} if mask is None else {"key_padding_mask": mask}
        return cast(Tensor, self.chosen.unchecked("forward")(query, key, value, **given))


def padded_route(batch: Batch) -> Tensor:
    """Ours."""
    found = varlen_attention(*batch.tensors, sequences=batch.sequences, backend=batch.chosen.name)
    return cast(Tensor, found)


def a_call_a_sequence(batch: Batch) -> Tensor:
    """On views of the packed rows, joined afterwards."""
    parts = zip(*(tensor.split(batch.lengths) for tensor in batch.tensors), strict=True)
    return torch.cat([batch.attend(q[None], k[None], v[None])[0] for q, k, v in parts])


def one_padded_call(batch: Batch) -> Tensor:
    """All padded to the longest, with a mask over the keys; the real rows taken out."""
    return _padded(batch, *batch.tensors, batch.lengths)


def length_buckets(batch: Batch) -> Tensor:
    """Sequences whose lengths round up to the same power of two share a padded call."""
    parts = list(zip(*(tensor.split(batch.lengths) for tensor in batch.tensors), strict=True))
    buckets: dict[int, list[int]] = {}
    for index, length in enumerate(batch.lengths):
        buckets.setdefault((length - 1).bit_length(), []).append(index)
    outputs: dict[int, Tensor] = {}
    for members in buckets.values():
        own = tuple(batch.lengths[index] for index in members)
        query, key, value = (torch.cat([parts[index][place] for index in members]) for place in range(3))
        rows = _padded(batch, query, key, value, own)
        outputs.update(zip(members, rows.split(own), strict=True))
    return torch.cat([outputs[index] for index in range(len(batch.lengths))])


def _padded(batch: Batch, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
    query, key, value = (
        torch.nn.utils.rnn.pad_sequence(list(tensor.split(lengths)), batch_first=True) for tensor in (query, key, value)
    )
    counts = torch.tensor(lengths, device=batch.device)
    mask = torch.arange(max(lengths), device=batch.device)[None] < counts[:, None]
    return batch.attend(query, key, value, mask)[mask]


def exact(batch: Batch) -> Tensor:
    """What all of them are to give, in float32: each sequence alone, on whatever kernel PyTorch takes."""
    outputs = []
    for rows in zip(*(tensor.float().split(batch.lengths) for tensor in batch.tensors), strict=True):
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in rows)
        outputs.append(F.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1))
    return torch.cat(outputs)


WAYS: dict[str, Callable[[Batch], Tensor]] = {
    ROUTE: padded_route,
    "a call a sequence": a_call_a_sequence,
    "one padded call": one_padded_call,
    "length buckets": length_buckets,
}


def call_of(batch: Batch, way: str) -> Call:
    """One call of that way."""
    return lambda: WAYS[way](batch)
