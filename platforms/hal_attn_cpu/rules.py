"""Rules of PyTorch's CPU flash kernel that no field of Capabilities can say."""

from __future__ import annotations

from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest


def positive_scale_rule(request: AttentionRequest) -> tuple[Refusal, ...]:
    """Causal needs a scale above 0: the kernel hides keys with -inf before it multiplies by the scale, so a scale of 0
    or below gives NaN (observed with PyTorch 2.13, in SDPA too, which runs the same kernel)."""
    if not request.causal or request.softmax_scale > 0:
        return ()
    return (Refusal("scale", f"causal with scale {request.scale}", "causal with a scale above 0"),)
