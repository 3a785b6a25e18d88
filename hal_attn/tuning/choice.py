"""The measured choice for a call, where HAL_ATTN_AUTOTUNE asks for one.

`on` measures where nothing is known, `cached` only uses what is known, `off` does neither. What is known comes from the
process group, else from the file; what is measured goes to both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    `trial` is the call that will follow. Without one this is a question, which neither measures nor decides anything
    for others. Backends that someone named, and calls with dropout, whose results cannot be compared, are left alone.
    """
    able = tuple(backend for backend, refusals in selection.considered if not refusals)
    request = selection.request
    if settings.autotune == "off" or explicit is not None or len(able) < 2 or request.dropout_p > 0:
        return selection
    kept = Kept(settings.cache_path, identity_of(selection.platform, request.device, registry, settings))
    calls = _Calls(request, able, shape_class(request), kept, GroupChoices.of_process(kept.digest))
    record = calls.record(trial, settings.autotune == "on")
    return selection if record is None else _chosen(selection, able, record)


@dataclass(frozen=True)
class _Calls:
    """Calls of one class, the backends that take this one, and where records of the class are."""

    request: AttentionRequest
    able: Sequence[AttentionBackend]
    name: str
    kept: Kept
    group: GroupChoices | None

    def record(self, trial: Trial | None, may_measure: bool) -> Record | None:
        """What is known or, for a call, measured now. Under a process group it is what the ranks settled on."""
        agreed = self._agreed()
        known = self.kept.find(self.name) if agreed is None else agreed
        if agreed is not None or trial is None:
            return known
        if may_measure and not self._complete(known):
            known = self._measured(trial) or known
        return known if self.group is None else self.group.settle(self.name, known)

    def _measured(self, trial: Trial) -> Record | None:
        """What this process measures, or another one did while this one waited; None where neither came to be."""
        obstacle = trial.obstacle()
        if obstacle:
            _log.warning("nothing is measured for %s: %s", self.request.describe(), obstacle)
            return None
        # Before the lock: while it is held, nothing may depend on another process, which may wait for the lock itself.
        trial.wait()
        with self.kept.locked(LOCK_SECONDS) as held:
            if not held:
                _log.warning("another process is still measuring after %g s; nothing is measured here", LOCK_SECONDS)
                return None
            agreed, found = self._agreed(), self.kept.find(self.name)
            if agreed is not None or self._complete(found):
                return found if agreed is None else agreed
            record, lasting = measure(self.able, trial, self.request)
            if lasting:
                self.kept.keep(self.name, record)
            return self.kept.find(self.name) or record if lasting else record

    def _agreed(self) -> Record | None:
        return None if self.group is None else self.group.find(self.name)

    def _complete(self, record: Record | None) -> bool:
        return record is not None and record.covers(backend.name for backend in self.able)


def _chosen(selection: Selection, able: Sequence[AttentionBackend], record: Record) -> Selection:
    """`selection` by `record`: its fastest backend that takes this call."""
    by_name = {backend.name: backend for backend in able}
    best = next((by_name[name] for name, _ in record.milliseconds if name in by_name), None)
    if best is None:
        return replace(selection, measurement=record)
    return replace(selection, chosen=best, source="measurement", measurement=record)
