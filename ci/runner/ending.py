"""A run that somebody ends: SIGINT or SIGTERM, as a service that cancels it sends, becomes one exception."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ended(BaseException):
    """The run was told to end; the argument is the signal's name. No `Exception`: no step may take it for its own."""


@contextmanager
def heeded() -> Iterator[None]:
    """Within it the first signal raises `Ended`, and later ones do nothing, so that a report can still be written."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Ended(signal.Signals(number).name)

    before = {each: signal.signal(each, end) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
