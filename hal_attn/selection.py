"""Which backend answers a request: candidates in order, the refusals of each, and a Selection that explains itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

from hal_attn import kinds
from hal_attn.backend import AttentionBackend
from hal_attn.errors import (
    BackendNotAvailableError,
    ConfigurationError,
    InvalidAttentionInputError,
    UnsupportedAttentionError,
    closest,
    shortened,
)
from hal_attn.guard import all_of, attempt
from hal_attn.hooks import lacks
from hal_attn.platform import Platform
from hal_attn.refusal import Refusal
from hal_attn.registry import Registry
from hal_attn.request import AttentionRequest
from hal_attn.settings import Settings
from hal_attn.tuning.record import Record
from hal_attn.warning import warn


class Candidate(NamedTuple):
    """One backend and every reason why it does not take the request; none where it does."""

    backend: AttentionBackend
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True)
class Explicit:
    """Backends that someone named, in order, and who did: "backend=", "use_backend" or "HAL_ATTN_BACKEND"."""

    names: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Selection:
    """The backend chosen for a request and the road to it.

    Attributes:
        chosen: the backend, None where none takes the request.
        source: what decided: who named it, the platform's default order, or a measurement.
        considered: (backend, refusals) in the order of preference, all of them, also those after the chosen one.
        notes: what a reader should know besides, such as a fallback.
        order_source: where the platform's default order comes from: a measurement, a publication, or neither.
        measurement: what was measured for calls like this one, where HAL_ATTN_AUTOTUNE uses it; None elsewhere.
    """

    request: AttentionRequest
    platform: Platform
    chosen: AttentionBackend | None
    source: str
    considered: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()
    order_source: str = ""
    measurement: Record | None = None

    @property
    def measured(self) -> tuple[tuple[str, float], ...]:
        """(backend, milliseconds of one call) of those that were measured, the fastest first."""
        return self.measurement.milliseconds if self.measurement else ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and what there is to say about the order or the measurement that decided."""
        told = list(self.notes)
        if self.measurement is not None:
            told.append(self.measurement.describe())
        elif self.order_source:
            told.append(f"the order of {self.platform.name} here: {self.order_source}")
        return tuple(told)

    def timing(self, candidate: Candidate) -> str:
        """What was measured of a candidate: its time, or why it was left out; empty where nothing was."""
        name, record = candidate.backend.name, self.measurement or Record()
        time, reason = dict(record.milliseconds).get(name), dict(record.left_out).get(name, "")
        return f"{time:.4g} ms" if time is not None else f"left out: {reason}" if reason else ""

    def verdict(self, candidate: Candidate) -> str:
        """What came of a candidate: "chosen", "takes it" (but another was preferred) or "refused"."""
        if candidate.backend is self.chosen:
            return "chosen"
        return "refused" if candidate.refusals else "takes it"

    def __str__(self) -> str:
        simulated = " (SIMULATED)" if self.platform.simulated else ""
        lines = [
            f"request   {self.request.describe()}",
            f"platform  {self.platform.name}{simulated}",
            f"chosen    {self.chosen.name if self.chosen else 'none'}, by {self.source}",
        ]
        lines += [f"note      {remark}" for remark in self.remarks]
        width = max((len(candidate.backend.name) for candidate in self.considered), default=0)
        for candidate in self.considered:
            timing = f", {timing}" if (timing := self.timing(candidate)) else ""
            lines.append(f"  {candidate.backend.name:<{width}}  {self.verdict(candidate)}{timing}")
            lines += [f"  {'':<{width}}    - {refusal}" for refusal in candidate.refusals]
        return "\n".join(lines)


_override: ContextVar[tuple[str, ...] | None] = ContextVar("hal_attn_use_backend", default=None)


def override() -> tuple[str, ...] | None:
    """The names of the innermost `use_backend` of this task or thread; None outside one."""
    return _override.get()


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Within it, calls of this task or thread take the first of `names` that accepts them.

    Explicit, so a call that none of them takes is an error unless HAL_ATTN_FALLBACK allows another. Other tasks and
    threads are untouched; the innermost one counts; without names the default order is back.

    Raises:
        InvalidAttentionInputError: a name that no platform has.
    """
    from hal_attn.registry import default_registry

    check_names(names, "use_backend", default_registry())
    token = _override.set(names)
    try:
        yield
    finally:
        _override.reset(token)


def explicit_names(backend: object, settings: Settings) -> Explicit | None:
    """Who named backends for this call, the nearest first: the argument, `use_backend`, the environment."""
    if backend is not None:
        return Explicit(_argument_names(backend), "backend=")
    names = override()
    if names is not None:
        return Explicit(names, "use_backend") if names else None
    if settings.backend:
        return Explicit(settings.backend, "HAL_ATTN_BACKEND")
    return None


def _argument_names(backend: object) -> tuple[str, ...]:
    fault = kinds.names(backend)
    if fault is not None:
        raise InvalidAttentionInputError(*fault)
    return (backend,) if isinstance(backend, str) else tuple(cast("Sequence[str]", backend))


def check_names(names: Sequence[str], source: str, registry: Registry) -> None:
    """Raises for a name that no platform has, with the closest one: ConfigurationError from the environment, else
    InvalidAttentionInputError."""
    for name in names:
        if name in registry.backend_names:
            continue
        hint = closest(str(name), registry.backend_names)
        known = ", ".join(registry.backend_names) or "none"
        if source.startswith("HAL_ATTN_"):
            message = f"{source}: got unknown backend {shortened(repr(name))}; allowed: {known}"
            raise ConfigurationError(f"{message} ({hint})" if hint else message)
        got = f"unknown backend {shortened(repr(name))}"
        raise InvalidAttentionInputError(source.rstrip("="), got, f"one of {known}", hint)


def select(
    request: AttentionRequest, registry: Registry, settings: Settings, explicit: Explicit | None = None
) -> Selection:
    """The selection for `request`; it never raises for want of a backend (see `require`).

    Raises:
        ConfigurationError, InvalidAttentionInputError: a name that no platform has.
        UnsupportedAttentionError: no platform owns the request's device.
    """
    check_names(settings.disabled_backends, "HAL_ATTN_DISABLED_BACKENDS", registry)
    if explicit is not None:
        check_names(explicit.names, explicit.source, registry)
    platform = registry.platform_for(request.device, settings)
    own = {backend.name: backend for backend in registry.backends_of(platform)}
    order, failure = attempt(lambda: all_of(platform.default_order(request), str, "default_order()"), ())
    ordered = [name for name in dict.fromkeys((*order, *own)) if name in own]
    default = tuple(_candidate(own[name], platform, request, registry, settings) for name in ordered)
    notes: tuple[str, ...] = ()
    if failure:
        notes = (f"default_order() of {platform.name} failed: {failure}; its backends are tried as it lists them",)
    if explicit is None:
        chosen = next((candidate.backend for candidate in default if not candidate.refusals), None)
        source = f"the default order of {platform.name}"
        return Selection(
            request, platform, chosen, source, default, notes, order_source=_order_source(platform, request)
        )
    selection = _select_named(explicit, platform, request, registry, settings, default)
    return replace(selection, notes=selection.notes + notes)


def _order_source(platform: Platform, request: AttentionRequest) -> str:
    why = attempt(partial(platform.order_source, request), "")[0]
    return why if isinstance(why, str) else ""


def _select_named(
    explicit: Explicit,
    platform: Platform,
    request: AttentionRequest,
    registry: Registry,
    settings: Settings,
    default: tuple[Candidate, ...],
) -> Selection:
    of_platform = {candidate.backend.name: candidate for candidate in default}
    named: list[Candidate] = []
    for name in dict.fromkeys(explicit.names):
        backend = registry.backend(name)
        assert backend is not None
        named.append(of_platform.get(name) or _candidate(backend, platform, request, registry, settings))
    source = f"{explicit.source.rstrip('=')} {','.join(explicit.names)}"
    chosen = next((candidate.backend for candidate in named if not candidate.refusals), None)
    if chosen is not None:
        return Selection(request, platform, chosen, source, tuple(named))
    if settings.fallback == "error":
        return Selection(request, platform, None, source, tuple(named))
    rest = tuple(candidate for candidate in default if candidate.backend.name not in explicit.names)
    chosen = next((candidate.backend for candidate in rest if not candidate.refusals), None)
    note = f"{source} refused; HAL_ATTN_FALLBACK={settings.fallback} let the default order of {platform.name} choose"
    return Selection(request, platform, chosen, f"fallback from {source}", (*named, *rest), (note,))


def _candidate(
    backend: AttentionBackend, platform: Platform, request: AttentionRequest, registry: Registry, settings: Settings
) -> Candidate:
    reasons: list[Refusal] = []
    if backend.name in settings.disabled_backends:
        reasons.append(Refusal("disabled", "HAL_ATTN_DISABLED_BACKENDS names it", "a backend that is not disabled"))
    if backend not in registry.backends_of(platform):
        owners = registry.owners(backend.name)
        names = " or ".join(owner.name for owner in owners)
        reasons.append(Refusal("platform", f"tensors of {platform.name} on {request.device}", names))
        absent = [(owner, found) for owner in owners if not (found := registry.detection(owner)).available]
        reasons += [Refusal("available", found.reason, f"a device of {o.name}", found.remedy) for o, found in absent]
        return Candidate(backend, tuple(reasons))
    missing = registry.unavailable(backend)
    if missing is not None:
        reasons.append(missing)
    for rules, asked in (
        (partial(platform.validate, request), f"validate() of {platform.name}"),
        (partial(backend.refusals, request), f"refusals() of {backend.name}"),
        (partial(lacks, backend, request), f"the signatures of {backend.name}"),
    ):
        answer, failure = attempt(partial(_refusals, rules, asked), ())
        # A parameter that the hook lacks is mostly one that its capabilities refused already.
        known = {reason.rule for reason in reasons}
        reasons += [reason for reason in answer if reason.rule not in known or rules.func is not lacks]
        if failure:
            reasons.append(
                Refusal("broken", f"{asked} failed: {failure}", "rules that answer", "report it to its vendor")
            )
    return Candidate(backend, tuple(reasons))


def _refusals(rules: Callable[[], object], asked: str) -> tuple[Refusal, ...]:
    return all_of(rules(), Refusal, asked)


def require(selection: Selection, registry: Registry, settings: Settings) -> AttentionBackend:
    """The chosen backend, warning where HAL_ATTN_FALLBACK=warn made it another than the one named.

    Raises:
        BackendNotAvailableError: each backend that was named is missing or broken.
        UnsupportedAttentionError: each candidate refuses; the message has every rule that each refused by.
    """
    if selection.chosen is not None:
        if selection.source.startswith("fallback from") and settings.fallback == "warn":
            reasons = "; ".join(f"{c.backend.name}: {r}" for c in selection.considered for r in c.refusals)
            warn(f"{selection.notes[0]}: {selection.chosen.name} ({reasons})")
        return selection.chosen
    refusals = tuple((candidate.backend.name, candidate.refusals) for candidate in selection.considered)
    named = not selection.source.startswith("the default order")
    own = registry.backends_of(selection.platform)
    missing = [(b, registry.unavailable(b) if b in own else None) for b, _ in selection.considered]
    if named and missing and all(reason is not None for _, reason in missing):
        lines = [f"{selection.source}: not available here"]
        for backend, reason in missing:
            told = backend.install in str(reason)
            install = "" if told else f"; install it with: {backend.install}"
            lines.append(f"  {backend.name}: {reason}{install}")
        raise BackendNotAvailableError("\n".join(lines), refusals)
    remedy = (
        "name another backend, or let HAL_ATTN_FALLBACK=warn or allow choose one"
        if named
        else "change what the rules below name"
    )
    raise UnsupportedAttentionError(
        f"no backend takes this call ({selection.request.describe()}), by {selection.source}; {remedy}", refusals
    )
