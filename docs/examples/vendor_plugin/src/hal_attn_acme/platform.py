"""`AcmePlatform`: whether an Acme device is here, and the backends that run on it."""

from __future__ import annotations

from typing import Any

import torch
from hal_attn import AttentionBackend, AttentionRequest, Detection, DeviceInfo, Platform, Refusal
from hal_attn.portable.math import MathBackend
from hal_attn.probing import DeviceKind, is_findable, versions_of

from hal_attn_acme.fused import AcmeFusedBackend
from hal_attn_acme.packed import AcmePackedBackend

DEVICES = DeviceKind(
    "Acme device",
    nodes=("acme[0-9]*",),
    visibility=("ACME_VISIBLE_DEVICES",),
    check="`python -c 'import torch; print(torch.acme.device_count())'` must print 1",
)


class AcmePlatform(Platform):
    """Acme devices through acme_torch."""

    name = "acme"
    api_version = 1
    device_type = "acme"
    process_group_backend = ""

    def __init__(self) -> None:
        self._backends = (
            AcmeFusedBackend(_kernels, self.architecture),
            AcmePackedBackend(_kernels),
            MathBackend(),
        )

    def detect(self) -> Detection:
        versions = (("torch", torch.__version__), *versions_of("hal-attn-acme"))
        if not is_findable("acme_torch"):
            return Detection(False, "acme_torch is not installed", "pip install hal-attn-acme", versions)
        import acme_torch

        reason = acme_torch.obstacle()
        if reason:
            return Detection(False, reason, "see the README of hal-attn-acme", versions)
        return DEVICES.detect("torch.acme", _device_count, versions)

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo("acme:0", "Acme One (the CPU under another name)", "acme1"),)

    def backends(self) -> tuple[AttentionBackend, ...]:
        return self._backends

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return ("acme_fused", "acme_packed", "torch_math")

    def validate(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        if request.heads > 128:
            return (Refusal("heads", str(request.heads), "at most 128 heads, a limit of the device"),)
        return ()

    def simulation(self, generation: str | None) -> Platform | None:
        from hal_attn_acme.simulated import SimulatedAcme

        return SimulatedAcme.parse(generation)

    def architecture(self, device: torch.device) -> str:
        """The generation of a device, as `DeviceInfo.architecture` names it."""
        return "acme1"


def _kernels() -> Any:
    from acme_torch import kernels

    return kernels


def _device_count() -> int:
    count: int = torch.acme.device_count()  # type: ignore[attr-defined]
    return count
