"""Running code of others, which may end in any way, and saying in one line how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
D = TypeVar("D")


def describe_exception(error: BaseException) -> str:
    """An exception in one line: its class and message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def attempt(action: Callable[[], T], default: D, passing: tuple[type[BaseException], ...] = ()) -> tuple[T | D, str]:
    """What `action` returns and "", or `default` and the exception that it raised, in one line.

    For code of a vendor, which may end in any way: `sys.exit()` and a panic of a Rust extension are no `Exception`, and
    would stop a process that only asked. The user's own interrupt passes, and so does what `passing` names.
    """
    try:
        return action(), ""
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, *passing)):
            raise
        return default, describe_exception(error)
