"""The measured choice for a call, where HAL_ATTN_AUTOTUNE asks for one.

`on` measures where nothing is known, `cached` only uses what is known, `off` does neither. What is known comes from the
process group, else from the file; what is measured goes to both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from hal_attn.backend import AttentionBackend
from hal_attn.registry import Registry
from hal_attn.request import AttentionRequest
from hal_attn.selection import Explicit, Selection
from hal_attn.settings import Settings
from hal_attn.tuning.group import GroupChoices
from hal_attn.tuning.kept import Kept, identity_of
from hal_attn.tuning.measuring import Trial, measure
from hal_attn.tuning.record import Record
from hal_attn.tuning.shape import shape_class

_log = logging.getLogger("hal_attn")

# A process that waits longer for another's measurement goes on with the platform's order. It bounds what happens where
# the other one waits, through its device, for a collective operation that this one has still to begin.
LOCK_SECONDS = 120.0


def tuned(
    selection: Selection, registry: Registry, settings: Settings, explicit: Explicit | None, trial: Trial | None
) -> Selection:
    """`selection` with the fastest measured backend chosen, where HAL_ATTN_AUTOTUNE asks for that and a choice is left.

    `trial` is the call that will follow; without one this is a question, which neither measures nor decides anything for
    others. Backends that someone named, and calls with dropout, whose results cannot be compared, are left as they are.
    """
    able = [backend for backend, refusals in selection.considered if not refusals]
    request = selection.request
    if settings.autotune == "off" or explicit is not None or len(able) < 2 or request.dropout_p > 0:
        return selection
    kept = Kept(settings.cache_path, identity_of(selection.platform, request.device, registry, settings))
    group = GroupChoices.of_process(kept.digest)
    name = shape_class(request)
    record = group.find(name) if group else None
    if record is None:
        record = kept.find(name)
        if trial is not None:
            record = _decide(able, trial, request, kept, group, name, record, settings)
    return selection if record is None else _chosen(selection, able, record)


def _decide(
    able: Sequence[AttentionBackend],
    trial: Trial,
    request: AttentionRequest,
    kept: Kept,
    group: GroupChoices | None,
    name: str,
    known: Record | None,
    settings: Settings,
) -> Record | None:
    """What is known, or measured now; under a process group what its ranks settled on."""
    record = known
    if settings.autotune == "on" and not _complete(known, able):
        obstacle = trial.obstacle()
        if obstacle:
            _log.warning("nothing is measured for %s: %s", request.describe(), obstacle)
        else:
            record = _measured(able, trial, request, kept, group, name) or known
    return record if group is None else group.settle(name, record)


def _complete(record: Record | None, able: Sequence[AttentionBackend]) -> bool:
    return record is not None and record.covers(backend.name for backend in able)


def _measured(
    able: Sequence[AttentionBackend],
    trial: Trial,
    request: AttentionRequest,
    kept: Kept,
    group: GroupChoices | None,
    name: str,
) -> Record | None:
    """The record that this process measures, or that another one measured while this one waited for the lock; None where
    that took too long."""
    # Before the lock: while it is held, nothing may depend on another process, which may wait for the lock itself.
    trial.wait()
    with kept.locked(LOCK_SECONDS) as held:
        if not held:
            _log.warning("another process still measures after %g s; %s", LOCK_SECONDS, "the platform's order counts here")
            return None
        if group is not None and (agreed := group.find(name)) is not None:
            return agreed
        found = kept.find(name)
        if _complete(found, able):
            return found
        record, lasting = measure(able, trial, request)
        if not lasting:
            return record
        kept.keep(name, record)
        return kept.find(name) or record


def _chosen(selection: Selection, able: Sequence[AttentionBackend], record: Record) -> Selection:
    """`selection` by `record`: its first backend that takes this call."""
    by_name = {backend.name: backend for backend in able}
    best = next((by_name[name] for name, _ in record.milliseconds if name in by_name), None)
    if best is None:
        return replace(selection, measurement=record)
    return replace(selection, chosen=best, source="measurement", measurement=record)
