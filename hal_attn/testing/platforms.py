"""What a platform says of itself, and its rule for sequences without tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import MappingProxyType

import torch

from hal_attn.errors import InvalidAttentionInputError, UnsupportedAttentionError
from hal_attn.platform import Platform
from hal_attn.testing.outcome import PASSED, Outcome, Planned, failed, not_run
from hal_attn.testing.plan import DTYPES
from hal_attn.testing.problem import Base, varlen
from hal_attn.testing.road import Road, own_settings


def plans(platform: Platform, device: torch.device) -> Iterator[Planned]:
    """The checks of a platform that is available."""
    for name, run in _CHECKS.items():
        yield Planned(name, "contract", "contract", partial(run, platform, device))
    yield Planned("empty sequences", "empty sequences", "blind rows", partial(_empty, platform, device))


def _devices(platform: Platform, device: torch.device) -> Outcome:
    if not platform.devices():
        return failed("it is available, and lists no device", "contract")
    return PASSED if platform.owns(device) else failed(f"it does not own tensors on its device {device}", "contract")


def _backends(platform: Platform, device: torch.device) -> Outcome:
    first, second = platform.backends(), platform.backends()
    if len(first) != len(second) or any(a is not b for a, b in zip(first, second, strict=True)):
        return failed("backends() gives other objects each time", "contract")
    names = [backend.name for backend in first]
    return PASSED if len(set(names)) == len(names) else failed(f"names twice: {', '.join(names)}", "contract")


def _order(platform: Platform, device: torch.device) -> Outcome:
    names = {backend.name for backend in platform.backends()}
    for dtype in DTYPES:
        road = Road(platform.backends()[0], platform, device)
        order = platform.default_order(road.request(varlen(Base(dtype, 64))))
        unknown = [name for name in order if name not in names]
        if unknown:
            return failed(f"default_order names {', '.join(unknown)}, which it does not have", "contract")
    return PASSED


def _empty(platform: Platform, device: torch.device) -> Outcome:
    """A platform that rejects them names the sequence, its counts and the way on; the others' are their backends'."""
    if not platform.rejects_empty_sequences:
        return not_run("this platform answers them: see the backends' own checks")
    problem = varlen(Base(torch.float16, 64), (5, 0, 9), (5, 3, 9))
    road = Road(platform.backends()[0], platform, device)
    with own_settings(HAL_ATTN_EMPTY_SEQUENCES="platform"):
        try:
            road.run(problem.on(device))
        except InvalidAttentionInputError as error:
            text = str(error)
            lacking = [part for part in ("sequence 1", "0 queries", "3 keys", "compact") if part not in text]
            return failed(f"the error leaves out {', '.join(lacking)}: {text}", "contract") if lacking else PASSED
        except UnsupportedAttentionError as error:
            return failed(f"they are refused by another rule: {error}", "contract")
    return failed("it declares that it rejects sequences without tokens, and takes them", "contract")


_CHECKS = MappingProxyType({"its devices": _devices, "its backends": _backends, "its order": _order})
