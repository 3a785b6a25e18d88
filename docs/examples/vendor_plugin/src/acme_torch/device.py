"""A device of PyTorch's private-use backend, in plain Python: its memory is the host's, its operators are the CPU's.

A tensor of the device is a CPU tensor's memory under another device: DLPack hands memory from one to the other, and the
field that names the device is changed on the way. Every operator that has no kernel of its own falls through to
`fallback`, which runs the CPU's on the same memory. Tensors of both devices in one call are an error, as on a real one.

What needs an allocator in C++ is not there: `copy.deepcopy` and `torch.save` of a tensor (move it to the CPU first).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

# DLDeviceType of the DLPack standard, which the DLTensor has behind its data pointer.
_CPU, _EXTENSION = 1, 12
_DEVICE_TYPE_OFFSET = ctypes.sizeof(ctypes.c_void_p)

_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

# Registrations last as long as these do.
_everything = torch.library.Library("_", "IMPL")
_aten = torch.library.Library("aten", "IMPL")


class Runtime:
    """What PyTorch asks of a device's module: `torch.acme`."""

    def is_available(self) -> bool:
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        """1, or 0 where ACME_VISIBLE_DEVICES hides it."""
        return int(os.environ.get("ACME_VISIBLE_DEVICES", "0").split(",")[0].strip() == "0")

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: object = None) -> None:
        """Nothing is ever under way."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        """The CPU's generator is the device's, and is seeded already."""

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False


def register(name: str) -> None:
    """Makes `torch.device(name)` a device, and `torch.<name>` its module. Once a process."""
    _setup_privateuseone_for_python_backend(name, backend_module=Runtime())
    _everything.fallback(fallback, "PrivateUse1")
    _aten.impl("_copy_from", _copy_from, "PrivateUse1")
    _aten.impl("_local_scalar_dense", _item, "PrivateUse1")


def fallback(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """`operator` by the CPU's kernel, on the same memory."""
    twins: dict[int, tuple[Tensor, Tensor]] = {}

    def to_cpu(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "acme" else value
        if not isinstance(value, Tensor):
            return value
        if value.device.type != "acme":
            _check_device(operator, value)
            return value
        # Only memory that PyTorch allocates can grow, and an `out` without elements has to.
        twin = _on(value, _CPU) if value.numel() else torch.empty(value.shape, dtype=value.dtype)
        twins[id(twin)] = twin, value
        return twin

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in twins:
            return _on(value, _EXTENSION)
        twin, given = twins[id(value)]
        if (given.shape, given.stride()) != (twin.shape, twin.stride()):
            given.data = _on(twin, _EXTENSION)
        return given

    args, kwargs = pytree.tree_map(to_cpu, (args, kwargs))
    found = operator(*args, **kwargs)
    # A view is an inference tensor if its base is, whatever the mode; everything else follows the mode.
    is_view = any(returned.alias_info is not None for returned in operator._schema.returns)
    given = [tensor.is_inference() for _, tensor in twins.values()]
    with torch.inference_mode(any(given) if is_view else torch.is_inference_mode_enabled()):
        return pytree.tree_map(to_device, found)


def _check_device(operator: Any, value: Tensor) -> None:
    # Numbers go anywhere, and so do indices: as on CUDA.
    if value.dim() and not operator.name().startswith(("aten::index", "aten::_index")):
        raise RuntimeError(f"{operator.name()}: expected all tensors on acme:0, but found one on {value.device}")


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """`target.copy_(source)`, whichever of them is on the device."""
    pair = [_on(tensor, _CPU) if tensor.device.type == "acme" else tensor for tensor in (target, source)]
    pair[0].copy_(pair[1])
    return target


def _item(tensor: Tensor) -> Any:
    return _on(tensor, _CPU).item()


def _on(tensor: Tensor, kind: int) -> Tensor:
    """The memory of `tensor` as a tensor of the other device; it lives as long as either does."""
    capsule = to_dlpack(tensor)
    ctypes.c_int32.from_address(_address(capsule, b"dltensor") + _DEVICE_TYPE_OFFSET).value = kind
    found: Tensor = from_dlpack(capsule)
    return found
