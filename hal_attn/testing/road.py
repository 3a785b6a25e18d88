"""A backend as users reach it: forced by name through hal_attn's own calls, on a registry that holds it alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hal_attn.backend import AttentionBackend, AttentionResult
from hal_attn.binding import bind_dense, bind_packed, explain_call
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.packing import PackedSequences
from hal_attn.platform import API_VERSION, Detection, DeviceInfo, Platform
from hal_attn.refusal import Refusal
from hal_attn.registry import Registry
from hal_attn.request import AttentionRequest, tensor_options
from hal_attn.selection import Selection
from hal_attn.settings import PREFIX
from hal_attn.testing.problem import Problem


class Road:
    """Calls of one backend on one device, each as `attention` or `varlen_attention` would make it with
    `backend=backend.name`.

    Args:
        backend: registered or not.
        platform: whose rules hold.
        device: where the tensors are.
    """

    def __init__(self, backend: AttentionBackend, platform: Platform, device: torch.device) -> None:
        self.backend = backend
        self.platform = platform
        self.device = device
        self._registry = Registry({platform.name: lambda: _Alone(platform, backend)})
        if self._registry.broken:
            raise InvalidAttentionInputError("backend", self._registry.broken[0].reason, "a backend that can be asked")

    @property
    def name(self) -> str:
        """The backend's."""
        return self.backend.name

    def selection(self, tensors: tuple[Tensor, ...], given: Mapping[str, Any]) -> Selection:
        """What `explain` would say of the call."""
        options = dict(given)
        sequences = options.pop("sequences", None)
        query, key, value = tensors
        return explain_call(self._registry, query, key, value, sequences, options, self.name)

    def refusals(self, problem: Problem, *, gradients: bool = False, **more: Any) -> tuple[Refusal, ...]:
        """Why the backend does not take a call; nothing where it does."""
        tensors = problem.on(self.device, requires_grad=gradients)
        return self.selection(tensors.laid_out(), {**tensors.given, **more}).considered[0].refusals

    def request(self, problem: Problem, **more: Any) -> AttentionRequest:
        """The request of a call."""
        tensors = problem.on(self.device)
        return self.selection(tensors.laid_out(), {**tensors.given, **more}).request

    def call(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> AttentionResult:
        """The call; raises as the public functions do."""
        options = dict(given)
        sequences: PackedSequences | None = options.pop("sequences", None)
        tensors = tensor_options(options)
        if sequences is None:
            return bind_dense(self._registry, query, key, value, options, self.name)(query, key, value, **tensors)
        call = bind_packed(self._registry, query, key, value, sequences, options, self.name)
        return call(query, key, value, sequences, **tensors)

    def run(self, problem: Problem, **more: Any) -> AttentionResult:
        """The call of a problem whose tensors are on the device already."""
        return self.call(*problem.laid_out(), **{**problem.given, **more})


class _Alone(Platform):
    """`platform` with one backend."""

    def __new__(cls, platform: Platform, backend: AttentionBackend) -> _Alone:
        # What the registry reads from the class has to be this platform's.
        names = ("name", "device_type", "process_group_backend", "rejects_empty_sequences", "simulated")
        own = type("Alone", (cls,), {name: getattr(platform, name) for name in names} | {"api_version": API_VERSION})
        made: _Alone = object.__new__(own)
        return made

    def __init__(self, platform: Platform, backend: AttentionBackend) -> None:
        self._platform, self._backend = platform, backend

    def __call__(self) -> _Alone:
        return self

    def detect(self) -> Detection:
        return Detection(True, "the conformance kit was given a device of it")

    def devices(self) -> tuple[DeviceInfo, ...]:
        return self._platform.devices()

    def backends(self) -> tuple[AttentionBackend, ...]:
        return (self._backend,)

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return (self._backend.name,)

    def owns(self, device: torch.device) -> bool:
        return True

    def validate(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        return self._platform.validate(request)


@contextmanager
def own_settings(**variables: str) -> Iterator[None]:
    """Within it the process has no HAL_ATTN_* variables but these, and empty sequences are answered everywhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with mock.patch.dict(os.environ, {**kept, f"{PREFIX}EMPTY_SEQUENCES": "compact", **variables}, clear=True):
        yield
