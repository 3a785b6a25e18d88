"""Pinned versions: read a constraints file with those it includes, and replace some of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)")


class ConstraintError(ValueError):
    """A line that pins nothing."""


def normal(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pin(text: str) -> tuple[str, str]:
    """`("torch", "2.11.0")` from `torch==2.11.0`."""
    match = _PIN.fullmatch(text.strip())
    if match is None:
        raise ConstraintError(f"got {text.strip()!r}, need NAME==VERSION")
    return normal(match[1]), match[2]


def read(path: Path) -> dict[str, str]:
    """Version by name, of `path` and of the files that it includes with `-c`; the file itself wins."""
    own: dict[str, str] = {}
    included: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text.startswith("-c "):
            included |= read(path.parent / text[3:].strip())
        elif text:
            try:
                name, version = pin(text)
            except ConstraintError as error:
                raise ConstraintError(f"{path.name} line {number}: {error}") from None
            own[name] = version
    return included | own


def effective(path: Path, overrides: Iterable[str]) -> dict[str, str]:
    """What `path` pins, with `overrides` (`NAME==VERSION`) in place of its own."""
    return read(path) | dict(pin(override) for override in overrides)


def write(pins: dict[str, str], path: Path) -> None:
    """One file without includes, as pip reads it."""
    path.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items())), encoding="utf-8")
