"""Whether a backend's hook can be called with what a request needs, read from the hook's own signature.

So a backend written for a narrower interface, without `scale` or without offsets of its own for keys, is refused by
name for what it does not know, instead of failing in the call or having an argument dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from hal_attn.backend import HOOKS, AttentionBackend
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest


def lacks(backend: AttentionBackend, request: AttentionRequest) -> tuple[Refusal, ...]:
    """A refusal for the hook, or for each parameter of it, that `request` needs and `backend` does not have."""
    return tuple(_lacks(backend, request))


def _lacks(backend: AttentionBackend, request: AttentionRequest) -> Iterator[Refusal]:
    native = request.packed and backend.implements("forward_varlen")
    hook = "forward_varlen" if native else "forward"
    if not backend.implements(hook):
        yield Refusal("hook", f"no {HOOKS[hook]}", hook)
        return
    parameters = inspect.signature(getattr(backend, hook)).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in _needed(backend, request, native):
        if name not in parameters:
            yield Refusal(name, "needed", f"a call without it: {hook} has no such parameter")


def _needed(backend: AttentionBackend, request: AttentionRequest, native: bool) -> Iterator[str]:
    """Keyword arguments that the call of `request` would pass beyond those that every hook has."""
    yield from request.options()
    if request.mask != "none":
        yield "mask"
    if request.key_padding_mask:
        yield "key_padding_mask"
    if request.sinks:
        yield "sinks"
    if request.alibi_slopes:
        yield "alibi_slopes"
    if native and not request.equal_lengths:
        yield from ("cu_seqlens_k", "max_seqlen_k", "cu_seqlens_k_host")
    if native and type(backend).metadata_builder is not AttentionBackend.metadata_builder:
        yield "metadata"
