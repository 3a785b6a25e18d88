"""Finds the platforms (entry points) and knows their backends; one broken plugin never hides another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import NoneType

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.errors import ConfigurationError, UnsupportedAttentionError, closest
from hal_attn.guard import attempt, watched
from hal_attn.platform import Detection, Platform
from hal_attn.plugins import BrokenPlatform, checked_simulation, installed, take_in
from hal_attn.refusal import Refusal
from hal_attn.settings import Settings


class Registry:
    """The platforms of this process and their backends, each asked once.

    Args:
        sources: by entry-point name, what gives the platform class (an entry point's `load`). Where two own one device,
            the one that comes first answers.
        distributions: by entry-point name, what it came with, for what is said of it when it is broken.
    """

    def __init__(
        self, sources: Mapping[str, Callable[[], object]], distributions: Mapping[str, str] | None = None
    ) -> None:
        broken: list[BrokenPlatform] = []
        self._backends: dict[Platform, tuple[AttentionBackend, ...]] = {}
        for name, load in sources.items():
            taken, failure = attempt(partial(watched, f"the plugin {name}", partial(take_in, name, load)), None)
            if taken is None:
                broken.append(BrokenPlatform(name, failure, (distributions or {}).get(name, "")))
            else:
                self._backends[taken[0]] = taken[1]
        self.platforms = tuple(self._backends)
        self.broken = tuple(broken)
        self._owners: dict[str, list[Platform]] = {}
        for owner, backends in self._backends.items():
            for backend in backends:
                self._owners.setdefault(backend.name, []).append(owner)
        self._detections: dict[Platform, Detection] = {}
        self._unavailable: dict[AttentionBackend, Refusal | None] = {}
        self._simulations: dict[str, Platform] = {}
        self._process = os.getpid()

    @classmethod
    def from_entry_points(cls) -> Registry:
        """The platforms that installed distributions declare."""
        return cls(*installed())

    @property
    def backend_names(self) -> tuple[str, ...]:
        """Names of all backends of all platforms, each once: `flash_attn` may run on two vendors' devices."""
        return tuple(self._owners)

    def backends_of(self, platform: Platform) -> tuple[AttentionBackend, ...]:
        """The backends of a platform of this registry, or of one that `simulation` gave: what it answered once."""
        return self._backends[platform]

    def owners(self, name: str) -> tuple[Platform, ...]:
        """The platforms that have a backend of that name, usable or not; none where it is unknown."""
        return tuple(self._owners.get(name, ()))

    def backend(self, name: str) -> AttentionBackend | None:
        """The first backend of that name, usable or not; None where no platform has it."""
        return next((b for owner in self.owners(name) for b in self.backends_of(owner) if b.name == name), None)

    def platform(self, name: str) -> Platform | None:
        """The platform of that name."""
        return next((platform for platform in self.platforms if platform.name == name), None)

    def check_platform(self, name: str) -> None:
        """Raises ConfigurationError unless HAL_ATTN_PLATFORM may be `name`."""
        if self.platform(name) is not None:
            return
        names = [platform.name for platform in self.platforms]
        close = closest(name, names)
        raise ConfigurationError(
            f"HAL_ATTN_PLATFORM: got {name!r}; allowed: {', '.join(names) or 'none'}"
            + (f" ({close})" if close else "")
            + "".join(f"; {b.name} is broken: {b.reason}" for b in self.broken if b.name == name)
        )

    def detection(self, platform: Platform) -> Detection:
        """`platform.detect()`, asked once; what it raises becomes the reason."""
        if self._process != os.getpid():
            # What a parent found does not hold in a forked child: an initialised device cannot be used there.
            self._process = os.getpid()
            self._detections.clear()
        if platform not in self._detections:
            found, failure = attempt(partial(watched, f"detect() of {platform.name}", platform.detect), None)
            if not isinstance(found, Detection):
                failure = failure or f"detect() returned a {type(found).__name__}"
                found = Detection(False, f"detection failed: {failure}", "reinstall the vendor's library or the plugin")
            self._detections[platform] = found
        return self._detections[platform]

    def unavailable(self, backend: AttentionBackend) -> Refusal | None:
        """`backend.unavailable()`, asked once; what it raises becomes the reason."""
        if backend not in self._unavailable:
            ask = partial(watched, f"unavailable() of {backend.name}", backend.unavailable)
            reason, failure = attempt(ask, None)
            if not isinstance(reason, (Refusal, NoneType)):
                failure = f"unavailable() returned a {type(reason).__name__}"
            install = f"install it with: {backend.install}" if backend.install else ""
            if failure:
                reason = Refusal("installed", f"broken: {failure}", "a library that loads", install)
            elif reason is not None and not reason.hint:
                reason = replace(reason, hint=install)
            self._unavailable[backend] = reason
        return self._unavailable[backend]

    def platform_for(self, device: torch.device, settings: Settings) -> Platform:
        """The platform that owns tensors on `device`.

        Raises:
            ConfigurationError: HAL_ATTN_PLATFORM names no platform.
            UnsupportedAttentionError: no platform (that the settings allow) owns the device.
        """
        wanted = settings.platform
        if wanted is not None:
            self.check_platform(wanted)
        if settings.simulate is not None and device.type == "cpu":
            if wanted not in (None, settings.simulate.partition(":")[0]):
                raise ConfigurationError(
                    f"HAL_ATTN_PLATFORM={wanted} excludes HAL_ATTN_SIMULATE={settings.simulate}; unset one of them"
                )
            return self.simulation(settings.simulate)
        owners = [p for p in self.platforms if attempt(partial(p.owns, device), False)[0]]
        allowed = [p for p in owners if wanted in (None, p.name)]
        usable = [p for p in allowed if self.detection(p).available]
        if usable:
            return usable[0]
        if owners and not allowed:
            reason = f"HAL_ATTN_PLATFORM={wanted} allows only that one; unset it or move the tensors"
        elif allowed:
            found = self.detection(allowed[0])
            reason = f"{allowed[0].name} owns it, but: {found.reason}" + (f"; {found.remedy}" if found.remedy else "")
        else:
            known = ", ".join(f"{p.name} ({p.device_type})" for p in self.platforms)
            reason = f"platforms here: {known or 'none'}" + "".join(
                f"; {b.name} is broken: {b.reason}" for b in self.broken
            )
        raise UnsupportedAttentionError(f"no platform runs tensors on device {device}: {reason}")

    def simulation(self, wanted: str) -> Platform:
        """The simulated platform that HAL_ATTN_SIMULATE asks for, as `name` or `name:generation`.

        Raises:
            ConfigurationError: the generation, or what follows it, is none that the platform knows.
            UnsupportedAttentionError: that platform brings no simulated kernels.
        """
        if wanted not in self._simulations:
            name, _, generation = wanted.partition(":")
            real = self.platform(name)
            if real is None:
                raise self._no_simulation(name)
            ask = partial(watched, f"simulation() of {name}", partial(_simulated, real, generation or None))
            simulated, failure = attempt(ask, None, (ConfigurationError,))
            if failure:
                raise UnsupportedAttentionError(f"HAL_ATTN_SIMULATE={wanted}: the simulation does not start: {failure}")
            if simulated is None:
                raise UnsupportedAttentionError(
                    f"HAL_ATTN_SIMULATE={wanted}: {name} brings no simulated kernels "
                    f"(platforms that do: {self._able()}); unset it to run on the CPU"
                )
            self._simulations[wanted], self._backends[simulated[0]] = simulated
        return self._simulations[wanted]

    def _no_simulation(self, name: str) -> ConfigurationError:
        broken = "".join(f"; {b.name} is broken: {b.reason}" for b in self.broken if b.name == name)
        return ConfigurationError(f"HAL_ATTN_SIMULATE: got {name!r}; allowed: {self._able()}{broken}")

    def _able(self) -> str:
        able = [p.name for p in self.platforms if attempt(partial(p.simulation, None), None)[0] is not None]
        return ", ".join(able) or "none, no platform here brings simulated kernels"


def _simulated(real: Platform, generation: str | None) -> tuple[Platform, tuple[AttentionBackend, ...]] | None:
    found = real.simulation(generation)
    return None if found is None else checked_simulation(found, real)


@lru_cache(maxsize=1)
def default_registry() -> Registry:
    """The registry of the installed platforms, made at the first call."""
    return Registry.from_entry_points()


def backends_with_hook(hook: str, registry: Registry | None = None) -> tuple[str, ...]:
    """Names of the backends usable here that implement `hook`."""
    registry = registry or default_registry()
    return tuple(_usable(registry, hook))


def _usable(registry: Registry, hook: str) -> Iterable[str]:
    for platform in registry.platforms:
        if registry.detection(platform).available:
            for backend in registry.backends_of(platform):
                if backend.implements(hook) and registry.unavailable(backend) is None:
                    yield backend.name
