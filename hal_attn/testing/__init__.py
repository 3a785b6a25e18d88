"""The conformance kit: is a backend right in all that it claims, and does it refuse the rest by name?

`verify()` checks what is here and returns a `Report`; `check_backend()` checks one backend that is given by hand. Under
pytest, subclass `hal_attn.testing.plugin.BackendConformance` or name a backend with `--hal-attn-backend`.
"""

from hal_attn.testing.features import FEATURES, RULES
from hal_attn.testing.report import (
    FORMAT,
    STATUSES,
    BackendReport,
    Check,
    Coverage,
    Effort,
    PlatformReport,
    Report,
    Status,
)
from hal_attn.testing.verification import check_backend, verify

__all__ = [
    "FEATURES",
    "FORMAT",
    "RULES",
    "STATUSES",
    "BackendReport",
    "Check",
    "Coverage",
    "Effort",
    "PlatformReport",
    "Report",
    "Status",
    "check_backend",
    "verify",
]
