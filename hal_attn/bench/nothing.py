"""A platform whose kernels do nothing, so that a call of it costs its dispatch alone.

It is found as any vendor's is, by the entry point of an installed distribution (here one in a folder, for the time of a
measurement). Its device is PyTorch's `meta`, whose tensors have shapes and no memory: no variable has to be set, which
would make every call a little dearer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from hal_attn.backend import AttentionBackend, AttentionResult
from hal_attn.bench.variables import environment
from hal_attn.capabilities import Capabilities
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult, PackedKernel
from hal_attn.packing import PackedSequences
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.plugins import GROUP
from hal_attn.registry import default_registry
from hal_attn.request import AttentionRequest

_CLAIMS = Capabilities(dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}), causal="bottom_right")


class NothingBackend(AttentionBackend):
    """A kernel that returns its value."""

    api_version = 1
    name = "nothing"
    capabilities = _CLAIMS

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> AttentionResult:
        return value

    def forward_varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cu_seqlens_host: tuple[int, ...] | None = None,
        causal: bool = False,
    ) -> AttentionResult:
        return value

    def bind(self, request: AttentionRequest) -> Callable[..., AttentionResult] | None:
        return nothing

    def bind_varlen(self, request: AttentionRequest) -> Callable[..., AttentionResult] | None:
        return nothing_packed


class FramedNothingBackend(BatchedKernel, PackedKernel):
    """The same kernel inside the frame that every vendor's adapter here has."""

    name = "nothing_framed"
    capabilities = _CLAIMS

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        return value, None


class NothingPlatform(Platform):
    """Owns the meta device's tensors."""

    api_version = 1
    name = "nothing"
    device_type = "meta"
    process_group_backend = ""

    def __init__(self) -> None:
        self._backends = (NothingBackend(), FramedNothingBackend(lambda: None, lambda device: "none"))

    def detect(self) -> Detection:
        return Detection(True, "nothing is always here")

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo("meta", "nothing"),)

    def backends(self) -> tuple[AttentionBackend, ...]:
        return self._backends

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return tuple(backend.name for backend in self._backends)


def nothing(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The kernel itself."""
    return value


def nothing_packed(query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
    """The kernel itself, packed."""
    return value


@contextmanager
def installed() -> Iterator[None]:
    """Within it `hal_attn` finds the platform, and forgets it afterwards."""
    with TemporaryDirectory() as folder:
        distribution = Path(folder) / "hal_attn_bench_nothing-0.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: hal-attn-bench-nothing\nVersion: 0\n")
        (distribution / "entry_points.txt").write_text(f"[{GROUP}]\nnothing = {__name__}:NothingPlatform\n")
        sys.path.append(folder)
        _look_again()
        try:
            yield
        finally:
            sys.path.remove(folder)
            _look_again()


def undisturbed() -> AbstractContextManager[None]:
    """Within it calls on meta tensors go to the platform, whatever the environment asks for."""
    names = ("PLATFORM", "SIMULATE", "BACKEND", "DISABLED_BACKENDS")
    return environment(**dict.fromkeys((f"HAL_ATTN_{name}" for name in names), None))


def _look_again() -> None:
    importlib.invalidate_caches()
    default_registry.cache_clear()
