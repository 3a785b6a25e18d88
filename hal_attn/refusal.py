"""Why a backend does not take a request, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """One broken rule.

    Attributes:
        rule: the rule's short name, an argument's where there is one ("dtype", "causal", "installed").
        have: what the request or the machine has.
        need: what the backend needs.
        hint: what to do about it; empty where nothing helps but another backend. A refusal of what Capabilities claims,
            on this device or with this build, has one.
    """

    rule: str
    have: str
    need: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.rule}: have {self.have}, need {self.need}"
        return f"{text} ({self.hint})" if self.hint else text
