"""Where a measurement was made: what stands above every table and in every file."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib import metadata

import torch

import hal_attn
from hal_attn.bench.ranks import Ranks
from hal_attn.registry import default_registry
from hal_attn.settings import read

_PACKAGES = ("fa3-fwd", "flash-attn-3", "flash-attn-4", "flash-attn", "flashinfer-python", "amd-aiter", "yunchang")


def facts(ranks: Ranks) -> dict[str, str]:
    """Machine, device, ranks, versions, settings and command, by name."""
    found = default_registry().platform_for(ranks.device, read())
    names = [info.name for info in found.devices() if info.device in (str(ranks.device), ranks.device.type)]
    device = f"{ranks.device.type}, {names[0]}" if names else str(ranks.device)
    versions = {"hal_attn": hal_attn.__version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= dict(found.detect().versions)
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("HAL_ATTN_")]
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "device": f"{device} (SIMULATED)" if found.simulated else device,
        "ranks": f"{ranks.size}, {found.process_group_backend}, {torch.get_num_threads()} CPU threads each",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "settings": " ".join(settings) or "none",
        "command": shlex.join(["hal-attn", *sys.argv[1:]]),
    }
