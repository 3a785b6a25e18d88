"""Where measured choices are kept: one JSON file for each device and set of versions, shared by processes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from hal_attn.guard import attempt
from hal_attn.platform import Platform
from hal_attn.registry import Registry
from hal_attn.settings import Settings
from hal_attn.tuning.record import Record

_log = logging.getLogger("hal_attn")

FORMAT = 2

Identity = tuple[tuple[str, str], ...]


def identity_of(platform: Platform, device: torch.device, registry: Registry, settings: Settings) -> Identity:
    """What measured times hold for: the device and every version that they may depend on."""
    index = device.index or 0
    devices, _ = attempt(platform.devices, ())
    found = devices[min(index, len(devices) - 1)] if devices else None
    runtime, failure = attempt(lambda: tuple(platform.runtime_versions(device)), ())
    return (
        ("platform", platform.name),
        *((("simulated", settings.simulate or "yes"),) if platform.simulated else ()),
        ("device", found.name if found else "unknown"),
        ("architecture", found.architecture if found else "unknown"),
        *registry.detection(platform).versions,
        *runtime,
        *((("runtime", f"unknown: {failure}"),) if failure else ()),
    )


@dataclass(frozen=True)
class Kept:
    """The file of one identity in `folder`."""

    folder: Path
    identity: Identity

    @property
    def digest(self) -> str:
        """Of the identity and the file's format."""
        return hashlib.sha256(json.dumps([FORMAT, self.identity]).encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """The file: named for people by platform and device, told apart by the digest."""
        about = dict(self.identity)
        simulated = "_simulated" if "simulated" in about else ""
        text = f"{about['platform']}{simulated}_{about['device'][:60]}_{self.digest}"
        return self.folder / ("".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in text) + ".json")

    def find(self, name: str) -> Record | None:
        """What is kept for a class; None where that is nothing, or nothing that can be read."""
        return self._records().get(name)

    @contextmanager
    def locked(self, seconds: float) -> Iterator[bool]:
        """The only process of this host (and of others that share the folder) in here; False where that takes longer
        than `seconds`. A folder that cannot hold a lock is nobody's, and True."""
        from filelock import FileLock, Timeout

        lock = FileLock(f"{self.path}.lock", timeout=seconds)
        held = True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            held = False
        except (OSError, NotImplementedError) as error:
            _log.debug("%s cannot be locked: %s", self.path, error)
        try:
            yield held
        finally:
            lock.release()

    def keep(self, name: str, record: Record) -> None:
        """Add a record, under the lock: the file is written whole and swapped in."""
        records = {**{key: kept.json() for key, kept in self._records().items()}, name: record.json()}
        content = {"format": FORMAT, "identity": [list(pair) for pair in self.identity], "classes": records}
        temporary: Path | None = None
        try:
            handle, temporary_name = tempfile.mkstemp(dir=self.folder, prefix=self.path.stem, suffix=".tmp")
            temporary = Path(temporary_name)
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(content, stream, indent=1, sort_keys=True)
            temporary.replace(self.path)
        except OSError as error:
            _log.warning("measured choices could not be kept in %s: %s", self.path, error)
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def _records(self) -> Mapping[str, Record]:
        try:
            state = self.path.stat()
        except FileNotFoundError:
            return {}
        except OSError as error:
            _log.warning("measured choices in %s cannot be read: %s", self.path, error)
            return {}
        return _read(self.path, self.identity, (state.st_ino, state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=16)
def _read(path: Path, identity: Identity, state: tuple[int, ...]) -> Mapping[str, Record]:
    """The records in a file, read once for each `state` of it. What is torn or foreign is only ignored, and said."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("identity") != [list(pair) for pair in identity]:
            raise ValueError("it is of another device, version or program")
        classes = content.get("classes")
        if not isinstance(classes, dict):
            raise ValueError("it has no classes")
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("measured choices in %s are unreadable and will be measured again: %s", path, error)
        return {}
    records: dict[str, Record] = {}
    for name, value in classes.items():
        try:
            records[name] = Record.parse(value, str(path))
        except ValueError as error:
            _log.warning("%s has an unreadable record, which will be measured again (%s): %s", path, name, error)
    return records


@dataclass(frozen=True)
class KeptFile:
    """One file of a folder, for a person: `records` by class, or the `problem` why it has none."""

    path: Path
    identity: Identity
    records: Mapping[str, Record]
    problem: str = ""


def all_kept(folder: Path) -> list[KeptFile]:
    """Every file of measured choices in `folder`, those of other versions and formats too."""
    return [_file(path) for path in sorted(folder.glob("*.json"))]


def _file(path: Path) -> KeptFile:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        identity = tuple((str(name), str(value)) for name, value in content["identity"])
        records = {str(name): Record.parse(value, str(path)) for name, value in content["classes"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return KeptFile(path, (), {}, f"unreadable: {error}")
    return KeptFile(path, identity, records)
