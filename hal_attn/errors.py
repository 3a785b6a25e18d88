"""What can go wrong, one class a kind: the caller's input, a missing capability, a missing backend, a wrong setting."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal_attn.refusal import Refusal


class HalAttnError(Exception):
    """Base of every error that `hal_attn` raises on purpose."""


class InvalidAttentionInputError(HalAttnError, ValueError):
    """The caller's tensors or options are wrong.

    `argument` names the parameter; the message says what it was, what is allowed and what to do.
    """

    def __init__(self, argument: str, got: object, allowed: str, remedy: str = "") -> None:
        self.argument = argument
        self._parts = (argument, shortened(got), allowed, remedy)
        text = f"{argument}: got {self._parts[1]}; allowed: {allowed}"
        super().__init__(f"{text}. {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[type[InvalidAttentionInputError], tuple[str, str, str, str]]:
        return type(self), self._parts


class UnsupportedAttentionError(HalAttnError, NotImplementedError):
    """The input is right, but nothing here can run it; `refusals` maps each backend to its reasons."""

    def __init__(self, message: str, refusals: Sequence[tuple[str, tuple[Refusal, ...]]] = ()) -> None:
        self.message, self.refusals = message, tuple(refusals)
        lines = [message]
        for name, reasons in self.refusals:
            lines.append(f"  {name}:")
            lines.extend(f"    - {reason}" for reason in reasons)
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[UnsupportedAttentionError], tuple[str, object]]:
        return type(self), (self.message, self.refusals)


class BackendNotAvailableError(HalAttnError, RuntimeError):
    """A backend was named that is missing or broken here; the message says how to get it."""

    def __init__(self, message: str, refusals: Sequence[tuple[str, tuple[Refusal, ...]]] = ()) -> None:
        self.message, self.refusals = message, tuple(refusals)
        super().__init__(message)

    def __reduce__(self) -> tuple[type[BackendNotAvailableError], tuple[str, object]]:
        return type(self), (self.message, self.refusals)


class ConfigurationError(HalAttnError, ValueError):
    """An environment variable or a setting is wrong; the message lists the right values."""


def closest(name: str, known: Iterable[str]) -> str:
    """ "did you mean X?" for the known name that is most like `name`; empty where none is near.

    A cutoff of 0.7 takes a slip of one letter in a short name, and no other short word for one: "acme" is no "ascend",
    "gpu" no "cpu".
    """
    return "".join(f"did you mean {other}?" for other in difflib.get_close_matches(name, list(known), n=1, cutoff=0.7))


def shortened(value: object, limit: int = 300) -> str:
    """`value` as text of at most `limit` characters: a wrong value can be of any size, a message cannot."""
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 24]}... ({len(text)} characters)"
