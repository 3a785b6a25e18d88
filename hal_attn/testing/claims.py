"""What a backend says of itself: it can be asked, it claims something, and it takes what it claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from hal_attn.backend import HOOKS
from hal_attn.capabilities import Capabilities
from hal_attn.refusal import Refusal
from hal_attn.testing.outcome import PASSED, Outcome, Planned, failed, not_run
from hal_attn.testing.problem import Base, batched
from hal_attn.testing.values import Subject

# A field of Capabilities that claims something, and the feature of which a call must then be taken.
FEATURE_OF = {
    "value_head_dim": "value head dim",
    "grouped_heads": "grouped heads",
    "window": "window",
    "key_padding_mask": "key padding mask",
    "softcap": "softcap",
    "sinks": "sinks",
    "alibi_slopes": "ALiBi",
    "dropout": "dropout",
    "deterministic": "deterministic",
    "lse": "LSE",
    "lse_gradient": "gradient of LSE",
    "gradients": "gradient",
}


def plans(subject: Subject) -> Iterator[Planned]:
    """What can be checked without a call."""
    yield Planned("it describes itself", "contract", "contract", lambda: _described(subject))


def kept(subject: Subject, planned: Iterable[Planned]) -> Iterator[Planned]:
    """For each claim: a call with it is taken. `planned` are the backend's other checks."""
    planned = list(planned)
    for feature in claimed_features(subject.road.backend.capabilities):
        yield Planned(f"claim kept: {feature}", feature, "claims", partial(_kept, subject, feature, planned))


def claimed_features(has: Capabilities) -> tuple[str, ...]:
    """The features that these capabilities claim."""
    found = [f"dtype {str(dtype).removeprefix('torch.')}" for dtype in sorted(has.dtypes, key=str)]
    found += [feature for name, feature in FEATURE_OF.items() if getattr(has, name)]
    found += [f"{kind} mask" for kind in sorted(has.masks)]
    found += ["causal"] if has.causal != "none" else []
    found += ["causal, unequal lengths"] if has.causal == "bottom_right" else []
    return tuple(found)


def nothing(subject: Subject) -> Outcome:
    """The failure of a backend that takes no plain call."""
    dtypes = sorted(subject.road.backend.capabilities.dtypes, key=str) or [torch.float32]
    seen = [refusal for dtype in dtypes for refusal in subject.road.refusals(batched(Base(dtype, 64)))]
    reasons = "; ".join(dict.fromkeys(map(str, seen))) or "batched and packed calls of every dtype are refused"
    return failed(f"it takes no plain call, so nothing that it claims can be exercised ({reasons})", "claims")


def _kept(subject: Subject, feature: str, planned: list[Planned]) -> Outcome:
    own = [each for each in planned if each.feature == feature]
    if any(not each.refusals for each in own):
        return PASSED
    helped = [[r for r in each.refusals if _would_help(subject, r)] for each in own]
    if own and all(helped):
        return not_run(f"claimed, and refused here: {helped[0][0]}")
    refusals = list(dict.fromkeys(refusal for each in own for refusal in each.refusals))
    reasons = "; ".join(map(str, refusals[:3])) or "no hook of it can be called so"
    text = f"{feature} is claimed, but every call with it is refused, with no hint that would help: {reasons}"
    return failed(text, "claims")


def _would_help(subject: Subject, refusal: Refusal) -> bool:
    """The refusal is about this device, build or mode, and says what would help: the call may be taken elsewhere."""
    architectures = [info.architecture for info in subject.road.platform.devices() if info.architecture]
    text = str(refusal)
    return bool(refusal.hint) or refusal.rule == "device" or any(name in text for name in architectures)


def _described(subject: Subject) -> Outcome:
    backend = subject.road.backend
    if not isinstance(backend.capabilities, Capabilities):
        return failed(f"its capabilities are a {type(backend.capabilities).__name__}", "contract")
    if not any(backend.implements(hook) for hook in HOOKS):
        return failed(f"it implements no hook of {', '.join(HOOKS)}", "contract")
    request = subject.road.request(batched(Base(torch.float32, 64)))
    first, second = backend.refusals(request), backend.refusals(request)
    if not isinstance(first, tuple) or not all(isinstance(refusal, Refusal) for refusal in first):
        return failed(f"refusals gave {first!r}, right is a tuple of Refusal", "contract")
    return PASSED if first == second else failed("refusals differ when asked twice", "contract")
