"""The options of one run, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.platforms import PLATFORMS, ROOT, Platform

# In the order in which they run.
STEPS = ("device", "environment", "detection", "unit", "hardware", "conformance", "bench")


@dataclass(frozen=True)
class Options:
    """One run of `ci/run`; `simulation` is what HAL_ATTN_SIMULATE gets, empty on a real device."""

    platform: Platform
    simulation: str = ""
    steps: tuple[str, ...] = STEPS
    out: Path = ROOT / "ci-report"
    environments: Path = ROOT / ".venv-ci"
    python: str = ""
    install: bool = True
    wheels: Path | None = None
    overrides: tuple[str, ...] = ()
    figures: Path | None = None
    keep_figures: bool = False
    slowdown: float = 1.25
    fail_on_slowdown: bool = False
    full: bool = False
    workers: int = 2
    timeout_minutes: float = 60.0
    tests: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """`cuda`, or `ascend:310P SIMULATED`."""
        return f"{self.simulation} SIMULATED" if self.simulation else self.platform.name

    @property
    def installs(self) -> Platform:
        """Whose pinned environment is made: a simulation runs on the CPU's."""
        return PLATFORMS["cpu"] if self.simulation else self.platform

    @property
    def log_folder(self) -> Path:
        """Where the whole output of each step goes."""
        return self.out / "logs"
