"""`verify` and `check_backend`: the kit run over what is here, or over one backend given by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.platform import Platform
from hal_attn.testing.report import BackendReport, Effort, Report

Progress = Callable[[str, int, int], None]


def verify(
    platform: str | None = None,
    backend: str | None = None,
    *,
    effort: Effort = "quick",
    progress: Progress | None = None,
) -> Report:
    """Checks the backends of the platforms here and returns what was found.

    Args:
        platform: only this one; None is every platform. With HAL_ATTN_SIMULATE the simulated platform stands in the
            place of the real one, and the CPU's own is out of reach.
        backend: only this one of them.
        effort: "quick" looks at each feature once, "full" in every dtype and with many more lengths.
        progress: called with (what comes next, checks done, checks in all).

    Raises:
        InvalidAttentionInputError: an argument is none of the allowed values.
        ConfigurationError: an environment variable is wrong.
    """
    raise NotImplementedError


def check_backend(
    backend: AttentionBackend,
    platform: Platform,
    device: torch.device | str,
    effort: Effort = "quick",
    *,
    progress: Progress | None = None,
) -> BackendReport:
    """Checks one backend, registered or not, as if it were the platform's only one.

    Args:
        backend: the instance to check.
        platform: whose rules hold; its other backends are the peers that claims are counted against.
        device: where the tensors are.
        effort, progress: as for `verify`.
    """
    raise NotImplementedError
