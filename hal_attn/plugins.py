"""Taking in what an entry point gives: is it a platform of this contract, and are its backends backends?

Everything here raises in plain words when a plugin is not what it should be; the registry keeps those words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from hal_attn.backend import AttentionBackend
from hal_attn.capabilities import Capabilities
from hal_attn.guard import all_of
from hal_attn.platform import API_VERSION, Platform

GROUP = "hal_attn.platforms"
OWN = "hal-attn"


@dataclass(frozen=True, slots=True)
class BrokenPlatform:
    """A plugin that could not be taken in, why, and the distribution that it came with where that is known."""

    name: str
    reason: str
    distribution: str = ""

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return f"reinstall or remove {self.distribution or 'it'}"


def installed() -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """What gives each platform that an installed distribution declares, and the distribution, by entry-point name.

    Those of this distribution come first, then the others by name, and a name that is taken stays taken: the second
    one goes by its name and its distribution, and is broken. So no plugin gets the devices of another by what it is
    called.
    """
    points = sorted(metadata.entry_points(group=GROUP), key=_precedence)
    sources: dict[str, Callable[[], object]] = {}
    distributions: dict[str, str] = {}
    for point in points:
        name, load = point.name, point.load
        if name in sources:
            name, load = f"{name} of {_distribution(point)}", _name_is_taken(name, distributions[name])
        sources[name], distributions[name] = load, _distribution(point)
    return sources, distributions


def _precedence(point: metadata.EntryPoint) -> tuple[bool, str, str]:
    own = point.dist is not None and point.dist.name.lower().replace("_", "-") == OWN
    return not own, point.name, _distribution(point)


def _distribution(point: metadata.EntryPoint) -> str:
    return "" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _name_is_taken(name: str, owner: str) -> Callable[[], object]:
    def load() -> object:
        raise ValueError(f"the platform name {name} is taken by {owner}; two cannot have one name")

    return load


def take_in(name: str, load: Callable[[], object]) -> tuple[Platform, tuple[AttentionBackend, ...]]:
    """The platform that the entry point `name` gives, and its backends.

    Raises:
        TypeError, ValueError: it is no platform of this contract; whatever the plugin itself raises.
    """
    found = load()
    if isinstance(found, type) and issubclass(found, Platform):
        # Asked first: a class that was written for another contract may lack what makes one of it.
        _check_version(found)
    platform = found() if callable(found) else found
    if not isinstance(platform, Platform):
        raise TypeError(f"the entry point gives a {type(platform).__name__}, not a hal_attn.Platform")
    _check_version(platform)
    _check_texts("the platform", platform, ("name", "device_type", "process_group_backend"))
    if platform.name != name:
        raise ValueError(f"the entry point is called {name}, the platform {platform.name}")
    hash(platform)
    return platform, checked_backends(platform)


def checked_backends(platform: Platform) -> tuple[AttentionBackend, ...]:
    """`platform.backends()`, each with a name of its own, claims, and an install command.

    Raises:
        TypeError, ValueError: one is no backend, or lacks these; whatever the plugin itself raises.
    """
    backends = all_of(platform.backends(), AttentionBackend, "backends()")
    for backend in backends:
        _check_texts(type(backend).__name__, backend, ("name",))
        _check_texts(backend.name, backend, ("install",))
        claimed = getattr(backend, "capabilities", None)
        if not isinstance(claimed, Capabilities):
            raise TypeError(
                f"{backend.name}.capabilities: got a {type(claimed).__name__}; allowed: hal_attn.Capabilities"
            )
        hash(backend)
    names = [backend.name for backend in backends]
    twice = sorted({backend for backend in names if names.count(backend) > 1})
    if twice:
        raise ValueError(f"two of its backends have one name: {', '.join(twice)}")
    return backends


def checked_simulation(platform: object, real: Platform) -> tuple[Platform, tuple[AttentionBackend, ...]]:
    """`platform`, which `real.simulation()` gave, and its backends.

    Raises:
        TypeError, ValueError: it is no platform, or not marked as the simulated one of `real`.
    """
    if not isinstance(platform, Platform):
        raise TypeError(f"simulation() gave a {type(platform).__name__}, not a hal_attn.Platform")
    if platform.name != real.name:
        raise ValueError(f"simulation() gave a platform called {platform.name}; it must have the name {real.name}")
    if not platform.simulated:
        raise ValueError("simulation() gave a platform that does not say so; it must have simulated = True")
    return platform, checked_backends(platform)


def _check_version(platform: Platform | type[Platform]) -> None:
    version = getattr(platform, "api_version", None)
    if version is None:
        raise ValueError(
            "it does not say which version of the platform contract it was written for; this hal_attn has version "
            f"{API_VERSION}: declare api_version = {API_VERSION}, if it was written for that"
        )
    if not isinstance(version, int):
        raise TypeError(f"api_version: got {version!r}; allowed: a number, here {API_VERSION}")
    if version != API_VERSION:
        late = "update hal-attn" if version > API_VERSION else "update the plugin"
        raise ValueError(
            f"it was written for version {version} of the platform contract, this hal_attn has {API_VERSION}: {late}"
        )


def _check_texts(owner: str, thing: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(thing, name, None)
        if not isinstance(value, str):
            raise TypeError(f"{owner}.{name}: got {value!r}; allowed: text")
