"""`AttentionBackend`: what a vendor implements, one class for each kernel family."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from hal_attn.capabilities import Capabilities
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

if TYPE_CHECKING:
    from hal_attn.packing import PackedSequences

AttentionResult = Tensor | tuple[Tensor, Tensor]

HOOKS = {
    "forward": "batched attention",
    "forward_varlen": "packed varlen attention",
    "forward_ring_kv_chunk": "ring KV-chunk attention",
}


@dataclass(frozen=True)
class AttentionMetadata:
    """What a backend prepares once for each batch and every layer shares.

    Backends subclass it with what their kernel wants (element offsets, host tuples, plans).
    """

    sequences: PackedSequences
    device: torch.device


class AttentionMetadataBuilder:
    """Prepares `AttentionMetadata` of a batch; this one, for backends that need nothing, holds the sequences alone."""

    def build(self, sequences: PackedSequences, request: AttentionRequest) -> AttentionMetadata:
        """Metadata for calls like `request` on `sequences`; never waits for the device when host lengths are known."""
        return AttentionMetadata(sequences, request.device)

    def key(self, request: AttentionRequest) -> object:
        """What of `request` the metadata depends on: equal keys share one metadata of a batch."""
        return request.device


class AttentionBackend(ABC):
    """One kernel family of one vendor.

    A subclass names itself, claims what it computes right in `capabilities`, and implements the hooks it has. The
    options it receives are those that the request sets to something else than their default, always within its claims,
    so a hook may leave out the parameters that it does not claim.

    Conventions (docs/semantics.md): `[B, S, H, D]` and `[T, H, D]` inputs, LSE `[B, H, Sq]` and `[H, Tq]` float32 in
    natural log, causal and windows aligned to the bottom right, bool masks True = may attend; a query without a key
    gives output 0 and LSE -inf. Calls without any query or without any key never reach a backend.

    Attributes:
        name: unique among the backends of its platform. A library that runs on two vendors' devices has one name on
            both (`flash_attn`): the tensors decide which is meant.
        capabilities: what it claims.
        install: the command that brings its library; empty where it comes with PyTorch.
        tolerances: by dtype, how many times the error of the precision rule (docs/semantics.md) it may make, where that
            is more than once; the conformance kit allows it and shows it. For what the kernel's arithmetic explains.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    install: ClassVar[str] = ""
    tolerances: ClassVar[Mapping[torch.dtype, float]] = MappingProxyType({})

    def unavailable(self) -> Refusal | None:
        """Why this backend cannot run on this machine at all (missing, broken, wrong device), or None.

        Called once a process; vendor libraries are imported here or later, never at import of the module. It may raise:
        the exception becomes the reason.
        """
        return None

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        """Every rule that `request` breaks. Override to add rules that no field of Capabilities can say."""
        return self.capabilities.refusals(request)

    # `*args: Any, **options: Any` lets a subclass name just the options that it claims; everything after `value` is
    # passed by keyword.

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> AttentionResult:
        """Batched attention: query `[B, Sq, H, D]`, key `[B, Sk, Hkv, D]`, value `[B, Sk, Hkv, Dv]` -> `[B, Sq, H, Dv]`
        and, with `return_lse`, LSE `[B, H, Sq]` float32.

        Options, each only where claimed: `scale`, `causal`, `window_size`, `mask`, `key_padding_mask`, `softcap`,
        `sinks`, `alibi_slopes`, `dropout_p`, `deterministic`, `return_lse`, as in `hal_attn.attention`.
        """
        self._missing("forward")

    def forward_varlen(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> AttentionResult:
        """Packed attention: query `[Tq, H, D]`, key `[Tk, Hkv, D]`, value `[Tk, Hkv, Dv]` -> `[Tq, H, Dv]` and, with
        `return_lse`, LSE `[H, Tq]` float32.

        Always given: `cu_seqlens` (int32 `[N + 1]`, leading 0), `max_seqlen`, `cu_seqlens_host` (a tuple, None where
        only the device knows). `cu_seqlens_k`, `max_seqlen_k`, `cu_seqlens_k_host` where keys have other offsets.
        `metadata` for a backend with a metadata builder of its own. The options of `forward` but the masks.
        """
        self._missing("forward_varlen")

    def forward_ring_kv_chunk(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """One rotated KV chunk of a ring: query `[Tq, H, D]`, key `[Tk, Hkv, D]`, value `[Tk, Hkv, Dv]` ->
        (output `[Tq, H, Dv]`, LSE `[H, Tq]` float32), to be joined by `merge_attention_states`.

        Options, each only where needed: `sequences` (how the chunk is packed, a PackedSequences; without it, one
        sequence), `scale`, `causal`, `window_size`, `softcap`.
        """
        self._missing("forward_ring_kv_chunk")

    def backward_varlen(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        *,
        sequences: PackedSequences,
        scale: float,
        causal: bool,
        window_size: tuple[int, int] | None,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gradients of query, key and value of one packed call whose keys are only some of those that made `output`
        `[Tq, H, Dv]` and `lse` `[H, Tq]`, as in one hop of a ring; None where this backend cannot, and plain PyTorch
        computes them."""
        return None

    def metadata_builder(self) -> AttentionMetadataBuilder:
        """The builder of this backend's metadata; prepared once for each batch, shared by all layers."""
        return AttentionMetadataBuilder()

    def unchecked(self, hook: str) -> Callable[..., Any]:
        """`hook` for a caller that asked `refusals` about the call; for a backend whose hooks ask it themselves."""
        found: Callable[..., Any] = getattr(self, hook)
        return found

    def bind(self, request: AttentionRequest) -> Callable[..., AttentionResult] | None:
        """The shortest way to run batched calls like `request` that carry no option tensor: a callable of (query, key,
        value); None to call `forward` with the request's options."""
        return None

    def bind_varlen(self, request: AttentionRequest) -> Callable[..., AttentionResult] | None:
        """The same for packed calls: a callable of (query, key, value, sequences), for sequences that all have queries
        and keys; None to call `forward_varlen`."""
        return None

    def prefers_batched(self, request: AttentionRequest) -> bool:
        """Whether packed calls like `request`, whose sequences all have the same lengths, should go to `forward`, over
        views `[B, S, H, D]`, although this backend has a packed kernel: where that is measured to be faster."""
        return False

    def implements(self, hook: str) -> bool:
        """Whether this backend has `hook`: "forward", "forward_varlen" or "forward_ring_kv_chunk"."""
        if hook not in HOOKS:
            raise ValueError(f"hook: got {hook!r}; allowed: {', '.join(HOOKS)}")
        return getattr(type(self), hook) is not getattr(AttentionBackend, hook)

    def _missing(self, hook: str) -> NoReturn:
        from hal_attn.registry import backends_with_hook

        others = backends_with_hook(hook)
        listing = ", ".join(others) if others else "none"
        raise NotImplementedError(
            f"{type(self).__name__} does not implement {HOOKS[hook]}\nbackends here that do: {listing}"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {getattr(self, 'name', '?')}>"
