"""Running code of others, which may end in any way or not at all, and saying in one line what came of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
D = TypeVar("D")

PATIENCE = 30.0


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


def watched(what: str, action: Callable[[], T]) -> T:
    """What `action` returns; after `PATIENCE` seconds without an answer the log says once that `what` is waited for.

    Nothing can stop code that does not return, and going on without it would leave it behind in the process, so whoever
    waits is told for whom. Code that never gives up the interpreter's lock cannot even be spoken about.
    """
    line = "%s has not answered for %g s; it is still waited for"
    timer = threading.Timer(PATIENCE, logging.getLogger("hal_attn").warning, (line, what, PATIENCE))
    timer.daemon = True
    timer.start()
    try:
        return action()
    finally:
        timer.cancel()
        timer.join()  # A thread that is about to end would still be there in a fork.


def all_of(answer: object, kind: type[T], asked: str) -> tuple[T, ...]:
    """`answer` of a plugin to `asked` as a tuple, if it is a collection of `kind`.

    Raises:
        TypeError: it is something else.
    """
    name = f"hal_attn.{kind.__name__}" if kind.__module__.startswith("hal_attn.") else kind.__name__
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise TypeError(f"{asked} gave a {type(answer).__name__}, not a tuple of {name}")
    found = tuple(answer)
    for each in found:
        if not isinstance(each, kind):
            raise TypeError(f"{asked} gave a {type(each).__name__}, not a {name}")
    return found
