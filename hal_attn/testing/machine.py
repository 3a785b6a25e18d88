"""The machine that a report was made on, without its name."""

from __future__ import annotations

import os
import platform as machine

import torch

import hal_attn


def facts() -> tuple[tuple[str, str], ...]:
    """(name, value): system, processor, Python, PyTorch, this package."""
    return (
        ("system", f"{machine.system()} {machine.machine()}"),
        ("processor", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used"),
        ("python", machine.python_version()),
        ("torch", torch.__version__),
        ("hal_attn", hal_attn.__version__),
    )
