"""Rules of libraries that run on several vendors' devices; NVIDIA's generations by name."""

from __future__ import annotations

from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

# Of the second and third dimension of a grid, on NVIDIA's devices and on AMD's.
MOST_IN_GRID = 65_535


def compute_capability(architecture: str) -> int | None:
    """90 for "sm90"; None for a device of another vendor, or of an unknown generation."""
    number = architecture.removeprefix("sm")
    return int(number) if number != architecture and number.isdecimal() else None


def grid_rule(request: AttentionRequest) -> tuple[Refusal, ...]:
    """For kernels that count sequences and heads in the second and third dimension of their grid, where there is room
    for 65,535: one more fails as it is launched (FlashAttention 2, CUTLASS's in PyTorch, cuDNN's backward pass; seen on
    an H200 with PyTorch 2.11, 70,000 sequences)."""
    counts = {"batch": (request.batch, "sequences"), "heads": (request.heads, "heads")}
    return tuple(
        Refusal(name, f"{count} {what}", f"at most {MOST_IN_GRID}, as many as a grid counts", "make several calls")
        for name, (count, what) in counts.items()
        if count > MOST_IN_GRID
    )


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
