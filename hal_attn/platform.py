"""`Platform`: one vendor's devices, found without crashing, and the backends that run on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

# What a platform declares as its `api_version`; it grows when a plugin that was right would no longer be.
API_VERSION = 1


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device: PyTorch's name ("cuda:0"), the vendor's, its architecture ("sm90", "gfx942", "Ascend910B1")."""

    device: str
    name: str
    architecture: str = ""
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_texts(self, "device", "name", "architecture")


@dataclass(frozen=True, slots=True)
class Detection:
    """Whether a platform can be used here.

    Attributes:
        available: tensors can live on one of its devices now.
        reason: why, or why not, in one sentence.
        remedy: what would make it available; empty where nothing is wrong.
        versions: (name, version) of PyTorch's build and the vendor's libraries.
    """

    available: bool
    reason: str
    remedy: str = ""
    versions: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        _check_texts(self, "reason", "remedy")
        for pair in self.versions:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"versions: got {self.versions!r}; allowed: pairs of a name and a version")


def _check_texts(value: object, *names: str) -> None:
    """A wrong type is an error where a plugin makes it, not where somebody prints it."""
    for name in names:
        text = getattr(value, name)
        if not isinstance(text, str):
            raise TypeError(f"{name}: got {text!r}; allowed: text")


class Platform(ABC):
    """One vendor. Found through the entry-point group `hal_attn.platforms`, which names a subclass of this.

    A platform is made once a process, without arguments. Making it touches no device; `detect` may look for devices but
    initialises none, and may raise: the exception becomes the reason.

    Attributes:
        name: what HAL_ATTN_PLATFORM calls it.
        device_type: `torch.device.type` of its tensors.
        process_group_backend: the `torch.distributed` backend for its devices; empty where there is none.
        rejects_empty_sequences: packed sequences without tokens are refused unless HAL_ATTN_EMPTY_SEQUENCES=compact.
        simulated: it runs a vendor's adapter over simulated kernels.
        api_version: the version of this contract that it was written for, `API_VERSION` then, as a number. It has no
            default, which would be the version that is installed, not the one that was read.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    process_group_backend: ClassVar[str]
    rejects_empty_sequences: ClassVar[bool] = False
    simulated: ClassVar[bool] = False
    api_version: ClassVar[int]

    @abstractmethod
    def detect(self) -> Detection:
        """Whether this platform can be used here, and why."""

    @abstractmethod
    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices here; called only where `detect` says available."""

    @abstractmethod
    def backends(self) -> tuple[AttentionBackend, ...]:
        """All backends of this platform, usable here or not, always the same objects."""

    @abstractmethod
    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        """Backend names, best first, for a request like this one."""

    def order_source(self, request: AttentionRequest) -> str:
        """Where `default_order` comes from for a request like this one: a measurement with its device and versions, a
        publication, or that it is not measured; empty where there is nothing to say."""
        return ""

    def runtime_versions(self, device: torch.device) -> tuple[tuple[str, str], ...]:
        """(name, version) of what the speed of kernels on `device` depends on and `detect` leaves out, since finding it
        may load libraries or initialise the device: driver, runtime, a processor's model. Measured choices are kept
        apart by them."""
        return ()

    def owns(self, device: torch.device) -> bool:
        """Whether tensors on `device` are this platform's."""
        return device.type == self.device_type

    def validate(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        """Rules of this platform that no backend of it can satisfy; empty where there are none."""
        return ()

    def simulation(self, generation: str | None) -> Platform | None:
        """This platform over simulated kernels on CPU tensors, as one device generation ("310P", "gfx942") or its
        default; None where it brings none. It has `simulated = True` and backends of the same names."""
        return None
