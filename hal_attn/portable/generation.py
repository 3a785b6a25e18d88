"""Rules of libraries that run on several vendors' devices; NVIDIA's generations by name."""

from __future__ import annotations

from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest


def compute_capability(architecture: str) -> int | None:
    """90 for "sm90"; None for a device of another vendor, or of an unknown generation."""
    number = architecture.removeprefix("sm")
    return int(number) if number != architecture and number.isdecimal() else None


def capability_rule(architecture: str, least: int, library: str) -> tuple[Refusal, ...]:
    """Refuses an NVIDIA device older than compute capability `least`; other vendors' devices are not its business."""
    capability = compute_capability(architecture)
    if capability is None or capability >= least:
        return ()
    return (Refusal("device", architecture, f"sm{least} or later for {library}"),)


def flash2_backward_rule(request: AttentionRequest, architecture: str) -> tuple[Refusal, ...]:
    """FlashAttention 2's backward pass lacks the shared memory of data-centre devices on sm86, sm89 and sm12x: head
    dims of 193 to 224 never run there, larger ones only without dropout (as PyTorch's own selector has it)."""
    capability = compute_capability(architecture)
    if not request.wants_gradient or capability is None or not (capability in (86, 87, 89) or capability >= 120):
        return ()
    dim = max(request.head_dim, request.value_head_dim)
    if dim <= 192 or (dim > 224 and not request.dropout_p):
        return ()
    with_dropout = " with dropout" if dim > 224 else ""
    return (Refusal("head_dim", f"{dim} with gradients{with_dropout} on {architecture}", "at most 192 there"),)


def repeatable_backward_rule(request: AttentionRequest) -> tuple[Refusal, ...]:
    """For PyTorch's operators, whose backward pass repeats bit by bit only by a process-wide switch."""
    if not (request.deterministic and request.wants_gradient):
        return ()
    return (Refusal("deterministic", "given with gradients", "inference, its backward has no such option"),)
