"""Every environment variable, in one table.

The table prints `hal-attn env`, the documentation page and the errors. Nothing is read at import; a change takes effect
at the next call, because each call compares `fingerprint()` with the one its answer was made for.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from hal_attn.errors import ConfigurationError, shortened
from hal_attn.warning import warn

PREFIX = "HAL_ATTN_"


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    `parse` turns its text into a value and raises ValueError with what is allowed; `values` says that for a person.
    An empty value counts as not set.
    """

    name: str
    field: str
    values: str
    meaning: str
    parse: Callable[[str], object]
    default: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment as one value; the fields are those of `VARIABLES`."""

    platform: str | None = None
    backend: tuple[str, ...] = ()
    disabled_backends: tuple[str, ...] = ()
    fallback: str = "error"
    empty_sequences: str = "platform"
    autotune: str = "off"
    cache_dir: Path | None = None
    simulate: str | None = None
    validate: str = "fast"
    log_level: int | None = None

    @property
    def cache_path(self) -> Path:
        """Folder of the measured choices: HAL_ATTN_CACHE_DIR, else the user's cache folder."""
        import platformdirs

        return self.cache_dir or Path(platformdirs.user_cache_dir("hal_attn", appauthor=False))


def _name(text: str) -> str:
    if not text.replace("_", "").replace("-", "").isalnum():
        raise ValueError("one name")
    return text


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise ValueError("names separated by single commas, none of them empty")
    return tuple(_name(name) for name in names)


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.lower()
        if value not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return value

    return parse


def _simulation(text: str) -> str:
    vendor, separator, generation = text.partition(":")
    vendor = _name(vendor).lower()
    if separator and not generation:
        raise ValueError("a device generation after the colon, as in ascend:310P")
    return f"{vendor}:{generation}" if generation else vendor


def _path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
        usable = path.is_dir() or not path.exists()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"a folder, existing or to be made ({error})") from None
    if not usable:
        raise ValueError("a folder, existing or to be made")
    return path


def _log_level(text: str) -> int:
    level = logging.getLevelNamesMapping().get(text.upper()) if hasattr(logging, "getLevelNamesMapping") else None
    if level is None:
        level = getattr(logging, text.upper(), None)
    if not isinstance(level, int):
        raise ValueError("one of DEBUG, INFO, WARNING, ERROR, CRITICAL")
    return level


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "HAL_ATTN_PLATFORM",
        "platform",
        "cpu, cuda, rocm, ascend, or a plugin's name",
        "only this platform is considered",
        _name,
    ),
    Variable(
        "HAL_ATTN_BACKEND",
        "backend",
        "backend names in order, as in a,b",
        "tried in this order; explicit, so a refusal is an error unless HAL_ATTN_FALLBACK allows it",
        _names,
    ),
    Variable(
        "HAL_ATTN_DISABLED_BACKENDS",
        "disabled_backends",
        "backend names, as in a,b",
        "never chosen; the reason is shown",
        _names,
    ),
    Variable(
        "HAL_ATTN_FALLBACK",
        "fallback",
        "error, warn, allow",
        "what happens when an explicitly named backend refuses a call",
        _choice("error", "warn", "allow"),
        "error",
    ),
    Variable(
        "HAL_ATTN_EMPTY_SEQUENCES",
        "empty_sequences",
        "platform, reject, compact",
        "packed sequences without tokens: the platform's own rule, always reject, or answer exactly",
        _choice("platform", "reject", "compact"),
        "platform",
    ),
    Variable(
        "HAL_ATTN_AUTOTUNE",
        "autotune",
        "off, on, cached",
        "measure the candidates once per shape class, or only use what was measured before",
        _choice("off", "on", "cached"),
        "off",
    ),
    Variable(
        "HAL_ATTN_CACHE_DIR",
        "cache_dir",
        "a folder",
        "where measured choices are kept",
        _path,
        "the user's cache folder",
    ),
    Variable(
        "HAL_ATTN_SIMULATE",
        "simulate",
        "ascend, rocm, cuda, or a plugin's name; a generation and choices may follow, as in ascend:310P,empty_lse=nan",
        "run that vendor's adapter on CPU tensors over its simulated kernels",
        _simulation,
    ),
    Variable(
        "HAL_ATTN_VALIDATE",
        "validate",
        "fast, full",
        "full also compares host with device offsets, which waits for the device",
        _choice("fast", "full"),
        "fast",
    ),
    Variable(
        "HAL_ATTN_LOG_LEVEL",
        "log_level",
        "DEBUG, INFO, WARNING, ERROR, CRITICAL",
        "level of the logger hal_attn",
        _log_level,
    ),
)

# os.environ decodes a value at each look-up (0.55 us here); the mapping behind it does not (0.03 us). Where an
# interpreter has no such mapping, os.environ itself serves, slower.
_environ = cast("Mapping[object, object]", getattr(os.environ, "_data", os.environ))
_keys = tuple(getattr(os.environ, "encodekey", str)(variable.name) for variable in VARIABLES)
# The size of the environment, and whether none of the variables is set, as nearly always: in C alone, because every
# call asks.
size: Callable[[], int] = _environ.__len__
none_set: Callable[[], bool] = partial(_environ.keys().isdisjoint, frozenset(_keys))


def fingerprint() -> tuple[object, ...]:
    """The raw values of all variables and the size of the environment: equal when `read()` would answer the same."""
    return (len(_environ), *map(_environ.get, _keys))


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from `environ` (the process's environment by default).

    Raises:
        ConfigurationError: a value that its variable does not allow.

    An unknown `HAL_ATTN_*` name is warned about, with the closest known name.
    """
    source = os.environ if environ is None else environ
    return _parse(tuple(sorted((name, value) for name, value in source.items() if name.startswith(PREFIX))))


@lru_cache(maxsize=64)
def _parse(items: tuple[tuple[str, str], ...]) -> Settings:
    known = {variable.name: variable for variable in VARIABLES}
    values: dict[str, object] = {}
    for name, text in items:
        variable = known.get(name)
        if variable is None:
            _warn_unknown(name, tuple(known))
        elif text.strip():
            try:
                values[variable.field] = variable.parse(text.strip())
            except ValueError as error:
                raise ConfigurationError(
                    f"{name}: got {shortened(text)!r}; allowed: {error}. It means: {variable.meaning}"
                ) from None
    return Settings(**values)  # type: ignore[arg-type]


def closest_variable(name: str) -> str:
    """The known variable whose name is most like `name`; empty where none is like it."""
    # Compared without the prefix that all share, which would make every name alike.
    tails = {variable.name.removeprefix(PREFIX): variable.name for variable in VARIABLES}
    close = difflib.get_close_matches(name.removeprefix(PREFIX), tails, n=1, cutoff=0.5)
    return tails[close[0]] if close else ""


def _warn_unknown(name: str, known: tuple[str, ...]) -> None:
    close = closest_variable(name)
    remedy = f"did you mean {close}?" if close else "known are: " + ", ".join(known)
    warn(f"unknown environment variable {name} is ignored; {remedy}")


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:  # Subscripting it needs Python 3.11.
    _StreamHandler = logging.StreamHandler


def apply_log_level(settings: Settings) -> None:
    """Set the logger's level when HAL_ATTN_LOG_LEVEL asks for one, with a handler on stderr where nobody gave one."""
    logger = logging.getLogger("hal_attn")
    ours = [handler for handler in logger.handlers if isinstance(handler, _EnvironmentHandler)]
    if settings.log_level is None:
        for handler in ours:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
        return
    logger.setLevel(settings.log_level)
    if not ours:
        logger.addHandler(_EnvironmentHandler())


class _EnvironmentHandler(_StreamHandler):
    """There while HAL_ATTN_LOG_LEVEL is set; it prints only where nobody else would."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger("hal_attn")
        if logger.handlers == [self] and not logging.getLogger().handlers:
            super().emit(record)
