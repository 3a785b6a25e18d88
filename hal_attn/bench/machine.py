"""Where a measurement was made: what stands above every table and in every file."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

import hal_attn
from hal_attn.registry import default_registry
from hal_attn.settings import VARIABLES, read

_PACKAGES = (
    "fa3-fwd",
    "flash-attn-3",
    "flash-attn-4",
    "flash-attn",
    "flashinfer-python",
    "amd-aiter",
    "yunchang",
    "diffusers",
    "transformers",
)
_PEERS = ("yunchang ", "diffusers ", "transformers ")
SIMULATED = "SIMULATED"
FILE_OPTIONS = ("--json", "--plot", "--compare")


def facts(device: torch.device, **more: str) -> dict[str, str]:
    """Machine, device, `more`, versions, settings and command, by name."""
    found = default_registry().platform_for(device, read())
    names = [info.name for info in found.devices() if info.device in (str(device), device.type)]
    name = f"{device.type}, {names[0]}" if names else str(device)
    if device.type == "cpu" and not found.simulated:
        name = f"cpu, {_processor()}"
    versions = {"hal_attn": hal_attn.__version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= dict(found.detect().versions)
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "device": f"{name} ({SIMULATED})" if found.simulated else name,
        **more,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "settings": _settings() or "none",
        "command": shlex.join(["hal-attn", *_without_folders(sys.argv[1:])]),
    }


def _settings() -> str:
    """The variables that are set; of a folder its name alone, for where a user keeps files is nobody's business."""
    values, found = read(), []
    for variable in sorted(VARIABLES, key=lambda variable: variable.name):
        if text := os.environ.get(variable.name, "").strip():
            value = getattr(values, variable.field)
            found.append(f"{variable.name}={value.name if isinstance(value, Path) else text}")
    return " ".join(found)


def _without_folders(arguments: Sequence[str]) -> list[str]:
    """The same, with the name alone of each file that an option of `FILE_OPTIONS` takes."""
    found: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if found and found[-1] in FILE_OPTIONS:
            found.append(Path(argument).name)
        elif equals and option in FILE_OPTIONS:
            found.append(f"{option}={Path(value).name}")
        else:
            found.append(argument)
    return found


def threads() -> str:
    """The threads of PyTorch on the CPU, for `facts`."""
    return f"{torch.get_num_threads()} of PyTorch on the CPU"


def headline(facts: Mapping[str, str], *more: str) -> str:
    """Device, versions of what computes, and the facts `more`, in a line for the title of a picture."""
    versions = [part for part in facts["versions"].split(", ") if not part.startswith(("python ", *_PEERS))]
    return "; ".join([facts["device"], ", ".join(versions), *(facts[name] for name in more if name in facts)])


def _processor() -> str:
    """The CPU's model where the system tells it, else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
