"""The vendor's own call that a backend ends in, to be made again without anything of ours around it.

A backend on the frame of `hal_attn.kernels` gets its functions from `library`; a copy of it over a library that writes
down what is called gives the function and its arguments, already laid out as the vendor wants them. For the backends on
PyTorch's own functions the attention operator that reaches PyTorch's dispatcher is the call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hal_attn.backend import AttentionBackend
from hal_attn.kernels import KernelBackend
from hal_attn.native import run_native
from hal_attn.packing import PackedSequences
from hal_attn.request import AttentionRequest

# What a library has beside functions and modules.
_PLAIN = (bool, int, float, str, tuple, list, dict, type, type(None))


@dataclass(frozen=True)
class VendorCall:
    """One call of a vendor's function: `call()` makes it again on the same tensors."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.arguments, **self.options)

    def with_gradients(self) -> tuple[VendorCall, tuple[Tensor, ...]]:
        """The same call on leaves of its own, and those of them whose gradient is wanted."""
        leaves: list[Tensor] = []

        def leaf(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.requires_grad):
                return value
            leaves.append(value.detach().requires_grad_())
            return leaves[-1]

        arguments = tuple(map(leaf, self.arguments))
        options = {name: leaf(value) for name, value in self.options.items()}
        return VendorCall(self.function, arguments, options), tuple(leaves)


def output_of(result: Any) -> Tensor:
    """The attention's output in what a vendor's function returns: the first tensor."""
    found = result[0] if isinstance(result, (tuple, list)) else result
    assert isinstance(found, Tensor)
    return found


def vendor_call(
    backend: AttentionBackend,
    request: AttentionRequest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences | None = None,
) -> VendorCall | None:
    """The call that `backend` ends in for a request without option tensors.

    None where it makes none, or several, as plain PyTorch and the padded route do.
    """
    if sequences is not None and not backend.implements("forward_varlen"):
        return None
    if isinstance(backend, KernelBackend):
        library = _Library(backend.library)
        _run(_over(backend, library), request, query, key, value, sequences)
        made = library.calls
    else:
        with _Operators() as operators:
            _run(backend, request, query, key, value, sequences)
        made = operators.calls
    return made[0] if len(made) == 1 else None


def _run(
    backend: AttentionBackend,
    request: AttentionRequest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences | None,
) -> None:
    if sequences is None:
        backend.unchecked("forward")(query, key, value, **request.options())
    else:
        run_native(backend, request, query, key, value, sequences)


def _over(backend: KernelBackend, library: _Library) -> KernelBackend:
    """A copy of `backend` on another library, which has taken nothing from its own yet."""
    made = copy.copy(backend)
    for kind in type(backend).__mro__:
        for name, value in vars(kind).items():
            if isinstance(value, cached_property):
                made.__dict__.pop(name, None)
    made.__dict__["library"] = library
    return made


@dataclass(eq=False)
class _Library:
    """A vendor's library, module or function, through which calls with tensors are written down."""

    real: Any
    calls: list[VendorCall] = field(default_factory=list)

    @property
    def __wrapped__(self) -> Any:
        """For `inspect.signature`."""
        return self.real

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        inside = not callable(self.real) and not isinstance(found, _PLAIN)
        return _Library(found, self.calls) if inside else found

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        result = self.real(*arguments, **options)
        values = (*arguments, *options.values())
        if sum(isinstance(value, Tensor) and value.dim() >= 3 for value in values) >= 3:
            self.calls.append(VendorCall(self.real, arguments, options))
        return result


class _Operators(TorchDispatchMode):
    """Writes down the attention operators that reach PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[VendorCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func):
            self.calls.append(VendorCall(func, tuple(args), dict(kwargs or {})))
        return func(*args, **(kwargs or {}))
