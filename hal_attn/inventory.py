"""What is here: the platforms and backends of this process, usable or why not, as values that print as tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from hal_attn import settings as environment
from hal_attn.guard import all_of, attempt, watched
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.refusal import Refusal
from hal_attn.registry import Registry, default_registry
from hal_attn.settings import Settings


@dataclass(frozen=True, slots=True)
class PlatformStatus:
    """One platform. `available` is False with a `reason` and a `remedy` where it cannot be used here."""

    name: str
    available: bool
    reason: str
    remedy: str
    versions: tuple[tuple[str, str], ...]
    devices: tuple[DeviceInfo, ...]
    process_group_backend: str
    simulated: bool


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One backend. `reason` is None where it is usable here."""

    name: str
    platform: str
    usable: bool
    reason: Refusal | None
    install: str
    simulated: bool


def platforms(registry: Registry | None = None, settings: Settings | None = None) -> tuple[PlatformStatus, ...]:
    """Every platform: available, devices and versions, or the reason and the remedy. A broken plugin is one of them."""
    registry, settings = registry or default_registry(), settings or environment.read()
    found = [_platform_status(registry, platform, settings) for platform in _all(registry, settings)]
    found += [
        PlatformStatus(broken.name, False, f"broken plugin: {broken.reason}", broken.remedy, (), (), "", False)
        for broken in registry.broken
    ]
    return tuple(found)


def backends(
    device: torch.device | str | None = None, registry: Registry | None = None, settings: Settings | None = None
) -> tuple[BackendStatus, ...]:
    """Every backend, or those for tensors on `device`: usable here, or why not.

    Raises:
        UnsupportedAttentionError: no platform owns `device`.
    """
    registry, settings = registry or default_registry(), settings or environment.read()
    owners = _all(registry, settings) if device is None else (registry.platform_for(torch.device(device), settings),)
    return tuple(status for platform in owners for status in _backend_statuses(registry, platform, settings))


def _all(registry: Registry, settings: Settings) -> tuple[Platform, ...]:
    """The platforms, with the simulated one in the place of the real where HAL_ATTN_SIMULATE asks for it."""
    wanted = settings.simulate
    if wanted is None:
        return registry.platforms
    simulated = registry.simulation(wanted)
    return tuple(simulated if platform.name == simulated.name else platform for platform in registry.platforms)


def _detection(registry: Registry, platform: Platform, settings: Settings) -> Detection:
    """What was detected, or why no call of this process reaches a platform that is here."""
    found = registry.detection(platform)
    if not found.available or platform.simulated:
        return found
    if settings.platform not in (None, platform.name):
        reason = f"HAL_ATTN_PLATFORM={settings.platform} excludes it"
        return replace(found, available=False, reason=reason, remedy="unset HAL_ATTN_PLATFORM")
    if settings.simulate is not None and platform.device_type == "cpu":
        reason = f"HAL_ATTN_SIMULATE gives tensors on the CPU to {settings.simulate.partition(':')[0]}, simulated"
        return replace(found, available=False, reason=reason, remedy="unset HAL_ATTN_SIMULATE")
    return found


def _platform_status(registry: Registry, platform: Platform, settings: Settings) -> PlatformStatus:
    found = _detection(registry, platform, settings)
    devices: tuple[DeviceInfo, ...] = ()
    reason, available = found.reason, found.available
    if available:
        devices, failure = devices_of(platform)
        if failure:
            reason, available = failure, False
    return PlatformStatus(
        platform.name,
        available,
        reason,
        found.remedy,
        found.versions,
        devices,
        platform.process_group_backend,
        platform.simulated,
    )


def devices_of(platform: Platform) -> tuple[tuple[DeviceInfo, ...], str]:
    """The devices of a platform that is available and "", or none and why they cannot be listed."""
    ask = partial(watched, f"devices() of {platform.name}", platform.devices)
    devices, failure = attempt(lambda: all_of(ask(), DeviceInfo, "devices()"), ())
    return devices, f"its devices cannot be listed: {failure}" if failure else ""


def _backend_statuses(registry: Registry, platform: Platform, settings: Settings) -> list[BackendStatus]:
    found = _detection(registry, platform, settings)
    statuses = []
    for backend in registry.backends_of(platform):
        reason = registry.unavailable(backend) if found.available else None
        if not found.available:
            reason = Refusal("available", found.reason, f"a device of {platform.name}", found.remedy)
        elif backend.name in settings.disabled_backends:
            reason = Refusal("disabled", "HAL_ATTN_DISABLED_BACKENDS names it", "a variable that does not")
        statuses.append(
            BackendStatus(backend.name, platform.name, reason is None, reason, backend.install, platform.simulated)
        )
    return statuses
