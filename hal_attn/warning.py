"""A warning about what the user wrote points at the user's line, however many calls of ours are in between."""

from __future__ import annotations

import sys
import warnings


def warn(text: str) -> None:
    """A `UserWarning` at the nearest line that is neither of this project nor of PyTorch, which may call us back.

    `skip_file_prefixes` of `warnings.warn` needs Python 3.12.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def _is_between(module: str) -> bool:
    package = module.partition(".")[0]
    return package in ("hal_attn", "torch") or package.startswith("hal_attn_")
