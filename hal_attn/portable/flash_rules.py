"""Rules of FlashAttention's interface that its signature does not show, shared by those who have it.

Its host code takes the longest key length at its word: a right edge of at least that is unlimited, and an unlimited
right edge beside a left one becomes that many keys. Neither is so where there are more queries than keys: query 0 is
then far before the first key (seen on an H200 with PyTorch 2.11: a left window over 50 queries and 30 keys gave wrong
rows). A packed call can say a longest length in which both are right; a batched one takes it from its tensors.
"""

from __future__ import annotations

from hal_attn.kernels import KernelCall
from hal_attn.packing import PackedSequences
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest


def longest_lengths(sequences: PackedSequences, call: KernelCall) -> tuple[int, int]:
    """(max_seqlen_q, max_seqlen_k) to pass with a packed call, so that its window is read as it was meant."""
    longest, longest_k = sequences.max_seqlen, sequences.max_seqlen_k
    if call.left >= 0 or call.right > 0:
        longest_k = max(longest_k, longest, call.right + 1)
    return longest, longest_k


def window_rule(request: AttentionRequest) -> tuple[Refusal, ...]:
    """Refuses a batched window that the host code would read as another."""
    if request.packed or request.window_size is None or request.seqlen_q is None or request.seqlen_k is None:
        return ()
    _, right = request.window_size
    if request.seqlen_q <= request.seqlen_k or 0 <= right < request.seqlen_k or request.causal:
        return ()
    have = f"{request.window_size} with more queries than keys"
    return (Refusal("window_size", have, "a right edge below the key length, or as many keys", "pack the sequences"),)


def positive_scale_rule(request: AttentionRequest) -> tuple[Refusal, ...]:
    """Keys are hidden with -inf, and the largest score is found, before the scale is applied: a scale of 0 or below
    gives NaN (FlashAttention 2 to 4, cuDNN, Composable Kernel)."""
    if request.softmax_scale > 0:
        return ()
    return (Refusal("scale", str(request.scale), "a scale above 0"),)
