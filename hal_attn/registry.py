"""Finds the platforms (entry points) and knows their backends; one broken plugin never hides another."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import metadata

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.errors import ConfigurationError, UnsupportedAttentionError
from hal_attn.guard import attempt
from hal_attn.platform import API_VERSION, Detection, Platform
from hal_attn.refusal import Refusal
from hal_attn.settings import Settings

GROUP = "hal_attn.platforms"


@dataclass(frozen=True, slots=True)
class BrokenPlatform:
    """A plugin that could not be taken in, and why."""

    name: str
    reason: str


class Registry:
    """The platforms of this process and their backends, each asked once.

    Args:
        sources: by entry-point name, what gives the platform class (an entry point's `load`).
    """

    def __init__(self, sources: Mapping[str, Callable[[], object]]) -> None:
        platforms: list[Platform] = []
        broken: list[BrokenPlatform] = []
        for name, load in sources.items():
            platform, failure = attempt(partial(_make, name, load), None)
            if platform is None:
                broken.append(BrokenPlatform(name, failure))
            else:
                platforms.append(platform)
        self.platforms = tuple(platforms)
        self.broken = tuple(broken)
        self._owners: dict[str, list[Platform]] = {}
        for owner in platforms:
            for backend in owner.backends():
                self._owners.setdefault(backend.name, []).append(owner)
        self._detections: dict[Platform, Detection] = {}
        self._unavailable: dict[AttentionBackend, Refusal | None] = {}
        self._simulations: dict[str, Platform] = {}
        self._process = os.getpid()

    @classmethod
    def from_entry_points(cls) -> Registry:
        """The platforms that installed distributions declare."""
        points = sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name)
        return cls({point.name: point.load for point in points})

    @property
    def backend_names(self) -> tuple[str, ...]:
        """Names of all backends of all platforms, each once: `flash_attn` may run on two vendors' devices."""
        return tuple(self._owners)

    def owners(self, name: str) -> tuple[Platform, ...]:
        """The platforms that have a backend of that name, usable or not; none where it is unknown."""
        return tuple(self._owners.get(name, ()))

    def backend(self, name: str) -> AttentionBackend | None:
        """The first backend of that name, usable or not; None where no platform has it."""
        return next((b for owner in self.owners(name) for b in owner.backends() if b.name == name), None)

    def platform(self, name: str) -> Platform | None:
        """The platform of that name."""
        return next((platform for platform in self.platforms if platform.name == name), None)

    def check_platform(self, name: str) -> None:
        """Raises ConfigurationError unless HAL_ATTN_PLATFORM may be `name`."""
        if self.platform(name) is not None:
            return
        names = [platform.name for platform in self.platforms]
        close = difflib.get_close_matches(name, names, n=1)
        raise ConfigurationError(
            f"HAL_ATTN_PLATFORM: got {name!r}; allowed: {', '.join(names) or 'none'}"
            + "".join(f" (did you mean {other}?)" for other in close)
            + "".join(f"; {b.name} is broken: {b.reason}" for b in self.broken if b.name == name)
        )

    def detection(self, platform: Platform) -> Detection:
        """`platform.detect()`, asked once; what it raises becomes the reason."""
        if self._process != os.getpid():
            # What a parent found does not hold in a forked child: an initialised device cannot be used there.
            self._process = os.getpid()
            self._detections.clear()
        if platform not in self._detections:
            found, failure = attempt(platform.detect, None)
            if not isinstance(found, Detection):
                failure = failure or f"detect() returned a {type(found).__name__}"
                found = Detection(False, f"detection failed: {failure}", "reinstall the vendor's library or the plugin")
            self._detections[platform] = found
        return self._detections[platform]

    def unavailable(self, backend: AttentionBackend) -> Refusal | None:
        """`backend.unavailable()`, asked once; what it raises becomes the reason."""
        if backend not in self._unavailable:
            reason, failure = attempt(backend.unavailable, None)
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
            simulated, failure = None, ""
            if real is not None:
                simulated, failure = attempt(partial(real.simulation, generation or None), None, (ConfigurationError,))
            if failure:
                raise UnsupportedAttentionError(f"HAL_ATTN_SIMULATE={wanted}: the simulation does not start: {failure}")
            if simulated is None:
                able = [p.name for p in self.platforms if attempt(partial(p.simulation, None), None)[0] is not None]
                raise UnsupportedAttentionError(
                    f"HAL_ATTN_SIMULATE={wanted}: no platform here brings simulated kernels for it "
                    f"(platforms that do: {', '.join(able) or 'none'}); unset it to run on the CPU"
                )
            self._simulations[wanted] = simulated
        return self._simulations[wanted]


def _make(name: str, load: Callable[[], object]) -> Platform:
    found = load()
    platform = found() if callable(found) else found
    if not isinstance(platform, Platform):
        raise TypeError(f"the entry point gives a {type(platform).__name__}, not a hal_attn.Platform")
    if platform.api_version != API_VERSION:
        raise ValueError(f"it was written for API version {platform.api_version}; this is {API_VERSION}")
    if platform.name != name:
        raise ValueError(f"the entry point is called {name}, the platform {platform.name}")
    names = [backend.name for backend in platform.backends()]
    twice = sorted({backend for backend in names if names.count(backend) > 1})
    if twice:
        raise ValueError(f"two of its backends have one name: {', '.join(twice)}")
    return platform


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
            for backend in platform.backends():
                if backend.implements(hook) and registry.unavailable(backend) is None:
                    yield backend.name
