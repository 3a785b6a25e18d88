"""One choice for all ranks of a process group, without any collective operation.

Ranks may call in any order, or never, so none may wait for another here. The first decision about a class that reaches
the group's store counts; whoever decides later takes it over. On one host the lock of the file comes first: one process
measures, the others wait for it and read.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from hal_attn.guard import attempt
from hal_attn.tuning.record import Record

_log = logging.getLogger("hal_attn")

ORIGIN = "the process group"


class GroupChoices:
    """What the ranks of the default process group decided, for one identity of device and versions."""

    def __init__(self, store: Any, digest: str) -> None:
        self._store, self._digest = store, digest

    @classmethod
    def of_process(cls, digest: str) -> GroupChoices | None:
        """Those of the default process group; None where this process is in none, or alone in it."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
            return None
        store, _ = attempt(dist.distributed_c10d._get_default_store, None)
        return None if store is None else cls(store, digest)

    def find(self, name: str) -> Record | None:
        """What was decided about a class; None where nobody did yet."""
        key = self._key(name)
        return self._told(lambda: self._store.get(key) if self._store.check([key]) else None)

    def settle(self, name: str, mine: Record | None) -> Record:
        """The first decision about a class: `mine` where there was none yet. Its None is the platform's order."""
        record = mine or Record()
        text = json.dumps({**record.json(), "origin": record.origin})
        return self._told(lambda: self._store.compare_set(self._key(name), "", text)) or record

    def _told(self, ask: Any) -> Record | None:
        """The record that the store answers. A store that fails costs the agreement, never the call."""
        text, failure = attempt(ask, None)
        record: Record | None = None
        if text:
            record, failure = attempt(lambda: _parse(text), None)
        if failure:
            _log.warning("the ranks cannot agree on measured choices: %s", failure)
        return record

    def _key(self, name: str) -> str:
        return f"hal_attn/{self._digest}/{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _parse(text: bytes) -> Record:
    value = json.loads(text)
    origin = str(value.get("origin", ""))
    return Record.parse(value, f"{ORIGIN}, from {origin}" if origin else ORIGIN)
