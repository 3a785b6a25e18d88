"""Measured choices: the candidates that take a request are timed once for each class of shapes, and the order is kept.

HAL_ATTN_AUTOTUNE=on measures where nothing is kept; cached only uses what is kept; off does neither. What is kept lives
in one JSON file a device and version set, under HAL_ATTN_CACHE_DIR, written whole and swapped in under a lock, so
processes share it and a torn or foreign file is only ignored.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hal_attn.backend import AttentionBackend
from hal_attn.guard import attempt
from hal_attn.registry import Registry
from hal_attn.request import AttentionRequest
from hal_attn.selection import Explicit, Selection
from hal_attn.settings import Settings

_log = logging.getLogger("hal_attn")

FORMAT = 1
REPEATS = 5


def tuned(
    selection: Selection,
    registry: Registry,
    settings: Settings,
    explicit: Explicit | None,
    run: Callable[[AttentionBackend], object] | None,
) -> Selection:
    """`selection` with the fastest measured backend chosen, where HAL_ATTN_AUTOTUNE asks for that and a choice is left.

    `run` answers the call with one backend; without it nothing is measured, only what is kept is used. Backends that
    someone named, and calls whose dropout would draw random numbers, are left as they are.
    """
    able = [backend for backend, refusals in selection.considered if not refusals]
    request = selection.request
    if settings.autotune == "off" or explicit is not None or len(able) < 2 or request.dropout_p > 0:
        return selection
    file = settings.cache_path / f"{_identity(selection, registry)}.json"
    times = _load(file).get(shape_class(request), {})
    if settings.autotune == "on" and run is not None and any(backend.name not in times for backend in able):
        times = _measure_all(able, run, request)
        _keep(file, shape_class(request), times)
    known = [backend for backend in able if backend.name in times]
    if not known:
        return selection
    best = min(known, key=lambda backend: times[backend.name])
    table = ", ".join(f"{backend.name} {times[backend.name] * 1e3:.3f} ms" for backend in known)
    return replace(selection, chosen=best, source="measurement", notes=(*selection.notes, f"measured: {table}"))


def shape_class(request: AttentionRequest) -> str:
    """Requests of one class share a measurement: lengths and batch count by powers of two, everything else exact."""
    lengths = [_power(value) for value in (request.batch, request.seqlen_q, request.seqlen_k)]
    lengths += [_power(request.tokens_q), _power(request.tokens_k)]
    options = sorted(f"{name}={value}" for name, value in request.options().items() if name != "scale")
    parts = [
        "packed" if request.packed else "batched",
        "x".join(map(str, lengths)),
        f"h{request.heads}/{request.kv_heads}",
        f"d{request.head_dim}/{request.value_head_dim}",
        str(request.dtype).removeprefix("torch."),
        f"mask={request.mask}" if request.mask != "none" else "",
        "padding" if request.key_padding_mask else "",
        "sinks" if request.sinks else "",
        "alibi" if request.alibi_slopes else "",
        "grad" if request.needs_grad else "",
        f"threads{torch.get_num_threads()}" if request.device.type == "cpu" else "",
        *options,
    ]
    return " ".join(part for part in parts if part)


def _power(value: int | None) -> int:
    return 0 if not value else 1 << (value - 1).bit_length()


def _identity(selection: Selection, registry: Registry) -> str:
    """Device and versions, as a file name."""
    platform, index = selection.platform, selection.request.device.index or 0
    devices, _ = attempt(platform.devices, ())
    name = devices[min(index, len(devices) - 1)].name if devices else "none"
    versions = "_".join(f"{library}-{version}" for library, version in registry.detection(platform).versions)
    text = f"{platform.name}{'-simulated' if platform.simulated else ''}_{name}_{versions}_format-{FORMAT}"
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text)[:200]


def _measure_all(
    able: list[AttentionBackend], run: Callable[[AttentionBackend], object], request: AttentionRequest
) -> dict[str, float]:
    """Seconds by name; a candidate that fails while it is measured is left out, and said."""
    times = {}
    for backend in able:
        seconds, failure = attempt(partial(_measure, backend, run, request), 0.0)
        if failure:
            _log.warning("%s failed while it was measured and is left out: %s", backend.name, failure)
        else:
            times[backend.name] = seconds
    return times


def _measure(backend: AttentionBackend, run: Callable[[AttentionBackend], object], request: AttentionRequest) -> float:
    """Seconds of one call: the median of a few, after one that warms up."""
    device = request.device
    run(backend)
    times = []
    for _ in range(REPEATS):
        _wait(device)
        begin = time.perf_counter()
        run(backend)
        _wait(device)
        times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    _log.info("measured %s: %.3f ms for %s", backend.name, median * 1e3, request.describe())
    return median


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _load(file: Path) -> dict[str, dict[str, float]]:
    try:
        content = json.loads(file.read_text())
        kept = {
            str(name): {str(backend): float(seconds) for backend, seconds in times.items()}
            for name, times in content.items()
        }
        if not all(0 < seconds < math.inf for times in kept.values() for seconds in times.values()):
            raise ValueError("a time that is no positive number")
        return kept
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("measured choices in %s are unreadable and will be measured again: %s", file, error)
        return {}


def _keep(file: Path, name: str, times: dict[str, float]) -> None:
    from filelock import FileLock

    temporary: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=10):
            content = {**_load(file), name: times}
            handle, name_of_temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".tmp")
            temporary = Path(name_of_temporary)
            with os.fdopen(handle, "w") as stream:
                json.dump(content, stream, indent=1, sort_keys=True)
            temporary.replace(file)
    except (OSError, TimeoutError) as error:
        _log.warning("measured choices could not be kept in %s: %s", file, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
