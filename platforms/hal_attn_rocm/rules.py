"""Rules that several of AMD's libraries share and that no field of Capabilities can say."""

from __future__ import annotations

from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

# The generations for which Composable Kernel's FlashAttention is built: MI200, MI300, MI350.
CK_ARCHITECTURES = ("gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")


def architecture_rule(architecture: str, allowed: tuple[str, ...], library: str) -> tuple[Refusal, ...]:
    """Refuses a generation that `library` has no kernels for."""
    if architecture in allowed:
        return ()
    return (Refusal("device", architecture or "an unknown generation", f"{', '.join(allowed)} for {library}"),)


def right_edge_rule(request: AttentionRequest) -> tuple[Refusal, ...]:
    """FlashAttention's interface, and AITER's after it, take a right edge of at least the (longest) keys as unlimited.
    It is not for more queries than that: the first see no key, and the next not all. How long the longest keys of a
    packed call are is settled after the sequences without queries have gone, so no length of the request tells."""
    if request.window_size is None or request.equal_lengths:
        return ()
    right = request.window_size[1]
    if right <= 0 or (not request.packed and right < (request.seqlen_k or 0)):
        return ()
    have = f"a right edge of {right} with more queries than keys"
    return (Refusal("window_size", have, "a right edge below the key length, or equal lengths"),)
