"""The call for a kind of call: one that was bound before for all that it depends on, so that a hit needs no checks.

```
options, overrides, environment -> the last two calls of these, each behind a check of the tensors that PyTorch makes in
                                   C++ (type, keys of dispatch, dtype, device, gradient, shape, strides)
                     none fits  -> any call of before, by equality of the options and of the kinds of tensors
                     there none -> a new one
```

A changed variable, `use_backend`, mode or option is another key. What is kept can be dropped at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from hal_attn.binding import BoundCall, bind_dense, bind_packed
from hal_attn.packing import PackedSequences
from hal_attn.registry import default_registry
from hal_attn.selection import override
from hal_attn.settings import fingerprint, none_set, size

PLAIN = ("scale", "causal", "softcap", "dropout_p", "deterministic", "return_lse")
Plain = tuple[object, ...]
Window = tuple[int | None, int | None] | None

_CAPACITY = 4096
_RECENT = 2
_bound: dict[object, BoundCall] = {}
_recent: dict[object, tuple[tuple[Callable[[Tensor, Tensor, Tensor], bool], BoundCall], ...]] = {}
_filling = threading.Lock()

_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
# What Dynamo guards its programs with; where a release has none, every call takes the way by equality.
_guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def bound_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plain: Plain,
    window_size: Window,
    backend: object,
    given: Mapping[str, Tensor] | None,
    sequences: PackedSequences | None = None,
) -> BoundCall:
    """The call that answers calls like this one. `plain` are the values of `PLAIN`, `given` the tensor options.

    Raises:
        Whatever binding raises: an argument is wrong, or no backend takes the call.
    """
    packed = None if sequences is None else sequences.signature
    scale, causal, softcap, dropout_p, deterministic, return_lse = plain
    try:
        if (
            window_size is None
            and causal.__class__ is deterministic.__class__ is return_lse.__class__ is bool
            and softcap.__class__ is dropout_p.__class__ is float
            and backend.__class__ is not list
        ):
            # As nearly always: asked at once, which is quicker than each of it in the key.
            environment = size() if none_set() else fingerprint()
            # The guard of a tensor that requires a gradient fits it in every mode.
            options: object = (plain, scale.__class__, backend, packed, override(), environment, _is_grad_enabled())
        else:
            options = _options(plain, window_size, backend, packed)
        if given is None:
            for fits, call in _recent.get(options, ()):
                if fits(query, key, value):
                    return call
        identity = _identity(query, key, value, given, options)
        known = None if identity is None else _bound.get(identity)
    except (TypeError, AttributeError):
        # Something that cannot be part of a key: the checks say what is wrong with it, outside this block so that their
        # error hides no other, or it is bound anew each time.
        identity = known = None
    call = known or _bind(query, key, value, plain, window_size, backend, given, sequences)
    if identity is not None:
        check = None
        # The guard takes one tensor for two arguments as never fitting.
        if given is None and _guards is not None and len({id(query), id(key), id(value)}) == 3:
            check = _guards(query, key, value, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        _remember(identity, options, call, check)
    return call


def identity_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plain: Plain,
    window_size: Window,
    given: Mapping[str, Tensor] | None,
    backend: object,
) -> tuple[object, ...] | None:
    """What a call depends on: tensors, modes, options, overrides and the environment; None for tensors that do not go
    together, which the checks tell apart.

    Raises:
        TypeError, AttributeError: something that cannot be part of a key, which only the checks can tell.
    """
    return _identity(query, key, value, given, _options(plain, window_size, backend, None))


def clear() -> None:
    """Forget all calls."""
    with _filling:
        _bound.clear()
        _recent.clear()


def _bind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plain: Plain,
    window_size: Window,
    backend: object,
    given: Mapping[str, Tensor] | None,
    sequences: PackedSequences | None,
) -> BoundCall:
    options = {**dict(zip(PLAIN, plain, strict=True)), "window_size": window_size, **(given or {})}
    if sequences is None:
        return bind_dense(default_registry(), query, key, value, options, backend)
    return bind_packed(default_registry(), query, key, value, sequences, options, backend)


def _remember(
    identity: object, options: object, call: BoundCall, fits: Callable[[Tensor, Tensor, Tensor], bool] | None
) -> None:
    with _filling:
        if identity not in _bound:
            _make_room(_bound)
            _bound[identity] = call
        if fits is not None:
            before = _recent.get(options, ())
            _make_room(_recent)
            _recent[options] = ((fits, call), *before[: _RECENT - 1])


def _options(plain: Plain, window_size: Window, backend: object, packed: str | None) -> tuple[object, ...]:
    """Options count with their types: `True` equals `1`, and only one of them is a flag."""
    types = tuple(value.__class__ for value in plain)
    window = None if window_size is None else _window(window_size)
    names = (list, *backend) if isinstance(backend, list) else backend
    return (plain, types, window, names, packed, override(), fingerprint(), _is_grad_enabled())


def _identity(
    query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Tensor] | None, options: object
) -> tuple[object, ...] | None:
    dtype, layout, device = query.dtype, query.layout, query.device
    if any(other.dtype is not dtype or other.layout is not layout or other.device != device for other in (key, value)):
        return None
    return (
        query.shape,
        key.shape,
        value.shape,
        dtype,
        layout,
        device,
        _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
        _is_any_autocast_enabled(),
        None if given is None else _kinds(given),
        options,
    )


def _window(window_size: Window) -> object:
    """The window with its types: 3.0 equals 3, but only one of them is a window."""
    assert window_size is not None
    return (window_size.__class__, *((edge, edge.__class__) for edge in window_size))


def _kinds(given: Mapping[str, Tensor]) -> tuple[object, ...]:
    wants_grad = torch.is_grad_enabled()
    return tuple((n, t.shape, t.dtype, t.layout, t.device, wants_grad and t.requires_grad) for n, t in given.items())


def _make_room(kept: MutableMapping[object, Any]) -> None:
    while len(kept) >= _CAPACITY:
        kept.pop(next(iter(kept)), None)
