"""From a backend's name, instance or class to its checks, each by itself, for a test runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hal_attn import settings as environment
from hal_attn.backend import AttentionBackend
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.guard import attempt
from hal_attn.platform import Platform
from hal_attn.registry import Registry, default_registry
from hal_attn.testing.outcome import Outcome, Planned, failed, perform
from hal_attn.testing.report import Check, Effort
from hal_attn.testing.road import own_settings
from hal_attn.testing.verification import out_of_reach, plan_of

Backend = str | AttentionBackend | Callable[[], AttentionBackend]


@dataclass(frozen=True)
class Item:
    """One check of one backend."""

    name: str
    backend: str
    platform: str
    planned: Planned

    def check(self) -> Check:
        """Runs it."""
        with own_settings():
            return perform(self.planned, self.backend, self.platform)


def items(
    backend: Backend,
    platform: str | Platform | None,
    device: str | None,
    effort: Effort,
    tolerances: Mapping[torch.dtype, float],
    *,
    prefix: str = "",
) -> list[Item]:
    """The checks of a backend; where it cannot run here, one that fails and says why.

    Raises:
        InvalidAttentionInputError: a name that nobody has.
    """
    registry = default_registry()
    found, owner = _found(registry, backend, platform)
    reason = _unavailable(registry, found, owner)
    if not reason:
        where = torch.device(owner.devices()[0].device if device is None else device)
        with own_settings():
            elsewhere = out_of_reach(found, owner, where)
            planned = () if elsewhere is not None else plan_of(found, owner, where, effort, tolerances)
        reason = "" if elsewhere is None else str(elsewhere)
    if reason:
        planned = (Planned("it can run here", "contract", "claims", lambda: _absent(reason)),)
    return [Item(prefix + each.name, found.name, owner.name, each) for each in planned]


def _absent(reason: str) -> Outcome:
    return failed(f"it cannot run here: {reason}", "claims")


def _found(registry: Registry, backend: Backend, platform: str | Platform | None) -> tuple[AttentionBackend, Platform]:
    """The backend, and the platform whose rules it is checked under."""
    if not isinstance(backend, str):
        made = backend if isinstance(backend, AttentionBackend) else backend()
        return made, _owner(registry, made.name, platform, must_have=False)
    owner = _owner(registry, backend, platform, must_have=True)
    return next(each for each in owner.backends() if each.name == backend), owner


def _owner(registry: Registry, name: str, platform: str | Platform | None, *, must_have: bool) -> Platform:
    if isinstance(platform, Platform):
        candidates = [platform]
    else:
        candidates = [each for each in _here(registry) if platform in (None, each.name)]
        if not candidates:
            raise InvalidAttentionInputError("platform", repr(platform), ", ".join(p.name for p in _here(registry)))
    having = [each for each in candidates if name in [backend.name for backend in each.backends()]]
    usable = [each for each in having if registry.detection(each).available]
    if having:
        return (usable or having)[0]
    if must_have:
        known = [backend.name for each in candidates for backend in each.backends()]
        raise InvalidAttentionInputError("backend", f"unknown backend {name!r}", ", ".join(known))
    return candidates[0] if platform is not None else next(p for p in candidates if p.device_type == "cpu")


def _here(registry: Registry) -> list[Platform]:
    """The platforms, with the simulated one first and in the place of the real."""
    wanted = environment.read().simulate
    if wanted is None:
        return list(registry.platforms)
    simulated = registry.simulation(wanted)
    return [simulated, *(each for each in registry.platforms if each.name != simulated.name)]


def _unavailable(registry: Registry, backend: AttentionBackend, platform: Platform) -> str:
    """Why the backend cannot run here; empty where it can."""
    detection = registry.detection(platform)
    if not detection.available:
        return f"{detection.reason}; {detection.remedy}" if detection.remedy else detection.reason
    refusal, failure = attempt(backend.unavailable, None)
    return failure or ("" if refusal is None else str(refusal))
