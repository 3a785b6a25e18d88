"""`verify` and `check_backend`: the kit run over what is here, or over one backend given by hand."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from hal_attn import settings as environment
from hal_attn.backend import AttentionBackend
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.guard import attempt
from hal_attn.inventory import devices_of
from hal_attn.platform import Platform
from hal_attn.refusal import Refusal
from hal_attn.registry import Registry, default_registry
from hal_attn.testing import platforms
from hal_attn.testing.features import FEATURES
from hal_attn.testing.machine import facts
from hal_attn.testing.outcome import Planned, failed, perform
from hal_attn.testing.plan import DTYPES, claimed, plan
from hal_attn.testing.problem import Base, batched, varlen
from hal_attn.testing.report import EFFORTS, BackendReport, Check, Coverage, Effort, PlatformReport, Report
from hal_attn.testing.road import Road, own_settings
from hal_attn.testing.values import Subject

Progress = Callable[[str, int, int], None]


def verify(
    platform: str | None = None,
    backend: str | None = None,
    *,
    effort: Effort = "quick",
    progress: Progress | None = None,
) -> Report:
    """Checks the backends of the platforms here and returns what was found.

    While it runs, the process has no HAL_ATTN_* variables but HAL_ATTN_EMPTY_SEQUENCES=compact.

    Args:
        platform: only this one; None is every platform. With HAL_ATTN_SIMULATE the simulated platform stands in the
            place of the real one, and the CPU's own is out of reach.
        backend: only this one of them.
        effort: "quick" looks at each feature once, "full" in every dtype and with many more lengths.
        progress: called with (what comes next, checks done, checks in all), and at the end with ("", all, all).

    Raises:
        InvalidAttentionInputError: an argument is none of the allowed values.
        ConfigurationError: an environment variable is wrong.
    """
    begin = time.perf_counter()
    registry = default_registry()
    _check_arguments(registry, platform, backend, effort)
    here = _platforms(registry, platform)
    with own_settings():
        found = [_Verified(registry, each, why, backend, effort) for each, why in here]
        total = sum(part.size for part in found)
        done = 0
        for part in found:
            done = part.run(progress, done, total)
    if progress is not None:
        progress("", total, total)
    broken = [
        PlatformReport(name=b.name, simulated=False, available=False, reason=f"broken plugin: {b.reason}")
        for b in registry.broken
        if platform in (None, b.name)
    ]
    return Report(
        machine=facts(),
        effort=effort,
        platforms=(*(part.platform_report for part in found), *broken),
        backends=tuple(report for part in found for report in part.backend_reports),
        seconds=time.perf_counter() - begin,
    )


def check_backend(
    backend: AttentionBackend,
    platform: Platform,
    device: torch.device | str,
    effort: Effort = "quick",
    *,
    features: Collection[str] | None = None,
    tolerances: Mapping[torch.dtype, float] | None = None,
    progress: Progress | None = None,
) -> BackendReport:
    """Checks one backend, registered or not, as if it were the platform's only one.

    Args:
        backend: the instance to check.
        platform: whose rules hold; its other backends are the peers that claims are counted against.
        device: where the tensors are.
        features: only the checks of these; the coverage counts them all.
        tolerances: by dtype, how many times the error of the precision rule is allowed, in the place of what the
            backend declares itself; shown in the report.
        effort, progress: as for `verify`.

    Raises:
        InvalidAttentionInputError: an argument is none of the allowed values.
    """
    if effort not in EFFORTS:
        raise InvalidAttentionInputError("effort", repr(effort), " or ".join(EFFORTS))
    device = torch.device(device)
    with own_settings():
        elsewhere = out_of_reach(backend, platform, device)
        reason = "" if elsewhere is None else str(elsewhere)
        planned = () if reason else plan_of(backend, platform, device, effort, tolerances)
        chosen = tuple(each for each in planned if features is None or each.feature in features)
        report = _reported(backend, platform, chosen, progress, 0, len(chosen), reason, given=tolerances)
        peers = _claims_of_peers(backend, platform, device)
    return _counted(replace(report, coverage=Coverage(claimed=claimed(planned))), peers)


def plan_of(
    backend: AttentionBackend,
    platform: Platform,
    device: torch.device,
    effort: Effort,
    tolerances: Mapping[torch.dtype, float] | None = None,
) -> tuple[Planned, ...]:
    """The checks that `check_backend` would run; each runs by `perform` within `own_settings`.

    A backend that cannot even be asked has one, which fails.
    """

    given = _times(tolerances or {})

    def planned() -> tuple[Planned, ...]:
        declared = _times({**backend.tolerances, **given})
        return plan(Subject(Road(backend, platform, device), tuple(declared.items())), effort)

    found, failure = attempt(planned, None)
    if found is not None:
        return found
    text = f"it cannot be asked what it takes: {failure}"
    return (Planned("it describes itself", "contract", "contract", lambda: failed(text, "contract")),)


def _times(tolerances: Mapping[torch.dtype, float]) -> Mapping[torch.dtype, float]:
    """`tolerances`, once it is sure that they are multiples and no errors."""
    for dtype, times in tolerances.items():
        if not times >= 1:
            have = f"{times} for {str(dtype).removeprefix('torch.')}"
            need = "1.0 or more: how many times the error of the precision rule is allowed"
            raise InvalidAttentionInputError("tolerances", have, need)
    return tolerances


def out_of_reach(backend: AttentionBackend, platform: Platform, device: torch.device) -> Refusal | None:
    """The refusal of every plain call by a backend that does not run on this device; None where it may."""

    def refusal() -> Refusal | None:
        road, found = Road(backend, platform, device), None
        for make, dtype in itertools.product((batched, varlen), DTYPES):
            found = next((r for r in road.refusals(make(Base(dtype, 64))) if r.rule == "device"), None)
            if found is None:
                return None
        return found

    return attempt(refusal, None)[0]


class _Verified:
    """One platform of a run: what is to be checked, and then what was found.

    Args:
        why: why its tensors are out of reach; empty where they are not.
    """

    def __init__(self, registry: Registry, platform: Platform, why: str, only: str | None, effort: Effort) -> None:
        detection = registry.detection(platform)
        self._versions = detection.versions
        self._platform, self._reason = platform, why or ("" if detection.available else detection.reason)
        self._remedy = "unset HAL_ATTN_SIMULATE" if why else detection.remedy
        devices, failure = ((), "") if self._reason else devices_of(platform)
        self._reason = self._reason or failure
        self._devices = tuple((info.device, info.name, info.architecture) for info in devices)
        device = torch.device(self._devices[0][0] if self._devices else "cpu")
        self._own = tuple(platforms.plans(platform, device)) if self._devices else ()
        self._planned: list[tuple[AttentionBackend, tuple[Planned, ...], str, str]] = []
        for backend in registry.backends_of(platform):
            if only in (None, backend.name):
                self._planned.append(self._plan(registry, backend, device, effort))
        self._peers = {} if only is None or self._reason else _claims_of_peers(None, platform, device)
        self.backend_reports: tuple[BackendReport, ...] = ()
        self.platform_report = self._of_platform(())

    @property
    def size(self) -> int:
        """How many checks there are."""
        return len(self._own) + sum(len(planned) for _, planned, _, _ in self._planned)

    def run(self, progress: Progress | None, done: int, total: int) -> int:
        """Runs them; returns how many are done now, of all platforms."""
        checks = _performed(self._own, "", self._platform, progress, done, total)
        self.platform_report = self._of_platform(checks)
        done += len(checks)
        reports = []
        for backend, planned, reason, remedy in self._planned:
            reports.append(_reported(backend, self._platform, planned, progress, done, total, reason, remedy))
            done += len(planned)
        claims = {**self._peers, **{report.name: report.coverage.claimed for report in reports}}
        self.backend_reports = tuple(_counted(report, claims) for report in reports)
        return done

    def _plan(
        self, registry: Registry, backend: AttentionBackend, device: torch.device, effort: Effort
    ) -> tuple[AttentionBackend, tuple[Planned, ...], str, str]:
        if self._reason:
            return backend, (), self._reason, self._remedy
        refusal = registry.unavailable(backend)
        if refusal is not None:
            return backend, (), f"{refusal.rule}: have {refusal.have}, need {refusal.need}", refusal.hint
        elsewhere = out_of_reach(backend, self._platform, device)
        if elsewhere is not None:
            return backend, (), str(elsewhere), elsewhere.hint
        return backend, plan_of(backend, self._platform, device, effort), "", ""

    def _of_platform(self, checks: tuple[Check, ...]) -> PlatformReport:
        return PlatformReport(
            name=self._platform.name,
            simulated=self._platform.simulated,
            available=not self._reason,
            reason=self._reason,
            remedy=self._remedy if self._reason else "",
            devices=self._devices,
            checks=checks,
            versions=self._versions,
        )


def _reported(
    backend: AttentionBackend,
    platform: Platform,
    planned: Sequence[Planned],
    progress: Progress | None,
    done: int,
    total: int,
    reason: str = "",
    remedy: str = "",
    given: Mapping[torch.dtype, float] | None = None,
) -> BackendReport:
    declared = attempt(lambda: {**backend.tolerances, **(given or {})}, {})[0]
    return BackendReport(
        name=backend.name,
        platform=platform.name,
        simulated=platform.simulated,
        available=not reason,
        reason=reason,
        remedy=remedy,
        checks=_performed(planned, backend.name, platform, progress, done, total),
        coverage=Coverage(claimed=claimed(tuple(planned))),
        tolerances=tuple((str(dtype).removeprefix("torch."), float(times)) for dtype, times in declared.items()),
    )


def _performed(
    planned: Sequence[Planned], backend: str, platform: Platform, progress: Progress | None, done: int, total: int
) -> tuple[Check, ...]:
    checks: list[Check] = []
    for each in planned:
        if progress is not None:
            progress(f"{backend or platform.name}: {each.name}", done + len(checks), total)
        checks.append(perform(each, backend, platform.name))
    return tuple(checks)


def _counted(report: BackendReport, claims: Mapping[str, tuple[str, ...]]) -> BackendReport:
    """`report` with what peers claim and it does not."""
    peers = {feature for name, features in claims.items() if name != report.name for feature in features}
    missing = tuple(feature for feature in FEATURES if feature in peers - set(report.coverage.claimed))
    return replace(report, coverage=replace(report.coverage, only_peers=missing))


def _claims_of_peers(
    backend: AttentionBackend | None, platform: Platform, device: torch.device
) -> dict[str, tuple[str, ...]]:
    """What the platform's usable backends but `backend` claim; nothing of them is run."""
    found: dict[str, tuple[str, ...]] = {}
    for peer in attempt(platform.backends, ())[0]:
        if peer is backend or attempt(peer.unavailable, None) != (None, ""):
            continue
        planned, _ = attempt(partial(plan_of, peer, platform, device, "quick"), None)
        if planned is not None:
            found[peer.name] = claimed(planned)
    return found


def _platforms(registry: Registry, only: str | None) -> list[tuple[Platform, str]]:
    """The platforms to check, each with why it is out of reach; the simulated one in the place of the real."""
    wanted = environment.read().simulate
    here: list[tuple[Platform, str]] = [(platform, "") for platform in registry.platforms]
    if wanted is not None:
        simulated = registry.simulation(wanted)
        here = [
            (simulated, "")
            if platform.name == simulated.name
            else (platform, f"CPU tensors are {simulated.name}'s under HAL_ATTN_SIMULATE={wanted}")
            if platform.device_type == "cpu"
            else (platform, "")
            for platform in registry.platforms
        ]
    return [(platform, why) for platform, why in here if only in (None, platform.name)]


def _check_arguments(registry: Registry, platform: str | None, backend: str | None, effort: str) -> None:
    names = [*(each.name for each in registry.platforms), *(each.name for each in registry.broken)]
    if platform is not None and platform not in names:
        raise InvalidAttentionInputError("platform", repr(platform), ", ".join(names))
    if backend is not None and backend not in registry.backend_names:
        raise InvalidAttentionInputError("backend", repr(backend), ", ".join(registry.backend_names))
    if effort not in EFFORTS:
        raise InvalidAttentionInputError("effort", repr(effort), " or ".join(EFFORTS))
