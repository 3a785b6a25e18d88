"""flash-attn built for ROCm on the CPU: the parameters of the CUDA build, some of them unread."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hal_attn.simulation.flash_attn import simulated_flash_attn

UNREAD: dict[str, dict[str, Any]] = {"ck": {"softcap": 0.0}, "triton": {"softcap": 0.0, "window_size": (-1, -1)}}


def simulated_rocm_flash_attn(kernels: str, empty_lse: float | None = None) -> SimpleNamespace:
    """The package's attention functions over `kernels`, "ck" or "triton"; a row without keys gives LSE -inf over CK and
    0.0 over Triton, or `empty_lse`."""
    default = -float("inf") if kernels == "ck" else 0.0
    library = simulated_flash_attn(default if empty_lse is None else empty_lse)
    names = ("flash_attn_func", "flash_attn_varlen_func")
    return SimpleNamespace(**{name: _as_on_rocm(getattr(library, name), kernels) for name in names})


def _as_on_rocm(function: Callable[..., Any], kernels: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(UNREAD[kernels])
        slopes = bound.arguments.get("alibi_slopes")
        if kernels == "triton":
            assert slopes is None or slopes.dim() == 2
            if bound.arguments.get("dropout_p"):
                raise RuntimeError("dropout over Triton, whose pattern is the same at each call")
        return function(*bound.args, **bound.kwargs)

    return wrapped
