"""What PyTorch's attention operators share: which parameters a release has, and how a tensor must lie in memory."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.nn import attention


def operator_parameters(operator: object) -> frozenset[str]:
    """The parameter names of an aten operator, or of a Python function in its place; none where there is none."""
    schema = getattr(getattr(operator, "default", None), "_schema", None)
    if schema is not None:
        return frozenset(argument.name for argument in schema.arguments)
    return frozenset(inspect.signature(operator).parameters) if callable(operator) else frozenset()


def active_flash_impl() -> str | None:
    """What `activate_flash_attention_impl` put behind aten's flash attention: "FA3", "FA4" or another name; None: its
    own kernel."""
    current = getattr(attention, "current_flash_attention_impl", None)
    if current is not None:
        name: str | None = current()
        return name
    # Some releases have the registry and the activation, but not yet the function that tells.
    active = getattr(getattr(attention, "_registry", None), "_FLASH_ATTENTION_ACTIVE", None)
    return active if active is None or isinstance(active, str) else str(active[0])


def last_contiguous(tensor: Tensor) -> Tensor:
    """A kernel reads the last dimension as if its stride were 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def aligned(tensor: Tensor, multiple: int) -> Tensor:
    """The last dimension contiguous, the other strides multiples of `multiple` elements, the first element on 16 bytes;
    a copy where that is not so."""
    # Memory itself begins on at least 16 bytes; its address would not be known while a graph is traced.
    begins = tensor.storage_offset() * tensor.element_size() % 16 == 0
    if begins and not tensor.shape[-1] % multiple and tensor.is_contiguous():
        return tensor
    strides = (stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1)
    fits = begins and tensor.stride(-1) == 1 and not any(stride % multiple for stride in strides)
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """A backward pass through one of these may follow."""
    given = (tensor for tensor in tensors if tensor is not None)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
