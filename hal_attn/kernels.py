"""What every adapter of a vendor's kernel does around it, done once, so that an adapter only translates.

```
forward, forward_varlen
  scale of the caller's head dim -> masks joined, hidden rows zeroed -> key heads repeated, head dims padded
    -> the adapter's `run`: the vendor's call in the vendor's conventions
  -> head dim cut back -> queries without keys set to 0 and -inf -> sinks joined
```
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hal_attn.backend import AttentionMetadata, AttentionMetadataBuilder, AttentionResult
from hal_attn.errors import UnsupportedAttentionError
from hal_attn.masks import MaskedInputs, edges, masked_inputs
from hal_attn.packing import PackedSequences, check_offsets
from hal_attn.probing import version_of
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest, tensor_options
from hal_attn.ring import RingBackend
from hal_attn.rows import leading_blind_rows, packed_blind_rows

KernelResult = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class PackedMetadata(AttentionMetadata):
    """A packed batch as kernels want it: `blind` marks the query rows, bool `[Tq]`, that see no key; None: none."""

    blind: Tensor | None = None


class PackedMetadataBuilder(AttentionMetadataBuilder):
    """Makes `PackedMetadata`; a subclass adds what its kernel wants. Never waits where host lengths are known."""

    def build(self, sequences: PackedSequences, request: AttentionRequest) -> PackedMetadata:
        _, right = edges(request.causal, request.window_size)
        blind = packed_blind_rows(sequences, right, request.tokens_q, request.device)
        return PackedMetadata(sequences, request.device, blind)

    def key(self, request: AttentionRequest) -> object:
        return (request.device, request.tokens_q, edges(request.causal, request.window_size)[1])


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """The options of one call as an adapter's `run` gets them.

    Attributes:
        scale: the factor on the scores, of the head dim that the caller passed.
        left, right: the band that causal and the window leave, aligned bottom right; -1 is unlimited.
        masks: the masks of a batched call and the band, joined; None where no mask is given.
        needs_lse: the LSE is wanted, by the caller or to join the sinks.
        metadata: of a packed call; None where the call is batched.
    """

    scale: float
    left: int = -1
    right: int = -1
    masks: MaskedInputs | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    needs_lse: bool = False
    metadata: PackedMetadata | None = None

    @property
    def causal(self) -> bool:
        """The band is the triangle and nothing else."""
        return self.left < 0 and self.right == 0


class KernelBackend(RingBackend):
    """An adapter over a vendor's library. Subclasses take `BatchedKernel`, `PackedKernel` or both.

    Args:
        library: gives the vendor's functions, at the first use: imports the package, or hands out simulated ones.
        architecture: names a device's generation, as `DeviceInfo.architecture` does.

    Attributes:
        distribution: what pip calls the library; empty where it comes with PyTorch.
        head_dim_multiple: head dims are padded with zeros to a multiple of this, which is exact.
        one_head_dim: the kernel has one head dim for query, key and value; the smaller is padded to the larger.
        native_grouped_heads: the kernel reads grouped key heads itself; else they are repeated.
        native_sinks: the kernel takes sinks itself; else they are joined to its output, by its LSE.
    """

    distribution: ClassVar[str] = ""
    head_dim_multiple: ClassVar[int] = 1
    one_head_dim: ClassVar[bool] = True
    native_grouped_heads: ClassVar[bool] = True
    native_sinks: ClassVar[bool] = False

    def __init__(self, library: Callable[[], Any], architecture: Callable[[torch.device], str]) -> None:
        self._load = library
        self.architecture = architecture

    @cached_property
    def library(self) -> Any:
        """The vendor's functions; the first look imports the package."""
        return self._load()

    def unavailable(self) -> Refusal | None:
        try:
            _ = self.library
        except ImportError:
            if not self.distribution or version_of(self.distribution) is not None:
                raise
            return Refusal("installed", f"{self.distribution} is not installed", self.distribution)
        return None

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        refusals = super().refusals(request)
        if request.sinks and request.wants_gradient and not self.native_sinks and not self.capabilities.lse_gradient:
            rule = Refusal("sinks", "sinks with gradients wanted", "sinks without gradients", "call it in no_grad()")
            refusals += (rule,)
        return refusals

    @abstractmethod
    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        """The vendor's call: `[B, S, H, D]` or `[T, H, D]`, heads and head dims as the kernel takes them -> (output in
        that layout, LSE `[B, H, Sq]` or `[H, Tq]`, or None where `call.needs_lse` is False)."""

    def metadata_builder(self) -> AttentionMetadataBuilder:
        return PackedMetadataBuilder()

    def _plain_call(self, request: AttentionRequest, metadata: PackedMetadata | None = None) -> KernelCall:
        """What `run` gets of a call like `request` that carries no option tensor."""
        left, right = edges(request.causal, request.window_size)
        return KernelCall(
            scale=request.softmax_scale,
            left=left,
            right=right,
            softcap=request.softcap,
            dropout_p=request.dropout_p,
            deterministic=request.deterministic,
            needs_lse=request.return_lse,
            metadata=metadata,
        )

    def _around(
        self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall, blind: Tensor | None, return_lse: bool
    ) -> AttentionResult:
        """`run`, and all around it but the masks; `blind` is `[B|1, H|1, Sq]`, or `[1, Tq]` of a packed call."""
        value_head_dim = value.shape[-1]
        group = query.shape[-2] // key.shape[-2]
        if group > 1 and not self.native_grouped_heads:
            key, value = key.repeat_interleave(group, -2), value.repeat_interleave(group, -2)
        output, lse = self.run(*self._padded(query, key, value), call)
        if output.shape[-1] != value_head_dim:
            output = output[..., :value_head_dim]
        if blind is not None:
            output = output.masked_fill(blind.transpose(-1, -2).unsqueeze(-1), 0.0)
            if lse is not None and call.sinks is not None and self.native_sinks:
                lse = torch.where(blind, call.sinks.to(lse.dtype)[:, None], lse)
            elif lse is not None:
                lse = lse.masked_fill(blind, -torch.inf)
        if call.sinks is not None and not self.native_sinks:
            assert lse is not None
            output, lse = with_sinks(output, lse, call.sinks)
        if not return_lse:
            return output
        assert lse is not None
        return output, lse

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return padded_head_dims(query, key, value, self.head_dim_multiple, self.one_head_dim)

    def _check(self, request: AttentionRequest) -> None:
        """A hook called by hand is given anything: what no dispatcher would have passed on is refused, not dropped."""
        refusals = self.refusals(request)
        if refusals:
            message = f"{self.name} does not take this call ({request.describe()})"
            raise UnsupportedAttentionError(message, [(self.name, refusals)])

    def _needs_lse(self, return_lse: bool, options: dict[str, Any]) -> bool:
        return return_lse or (options.get("sinks") is not None and not self.native_sinks)


class BatchedKernel(KernelBackend):
    """An adapter whose `run` takes batched calls."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> AttentionResult:
        """As `AttentionBackend.forward`; by hand, checked like a call of `attention`.

        Raises:
            InvalidAttentionInputError, UnsupportedAttentionError: as there.
        """
        from hal_attn.validation import dense_request

        request = dense_request(query, key, value, options)
        self._check(request)
        given: dict[str, Any] = {**request.options(), **tensor_options(options)}
        return self._batched(query, key, value, **given)

    def unchecked(self, hook: str) -> Callable[..., Any]:
        return self._batched if hook == "forward" else super().unchecked(hook)

    def bind(self, request: AttentionRequest) -> Callable[..., AttentionResult] | None:
        call, return_lse = self._plain_call(request), request.return_lse
        assert request.seqlen_q is not None
        assert request.seqlen_k is not None
        if leading_blind_rows(request.seqlen_q, request.seqlen_k, call.right):
            return None
        return lambda query, key, value: self._around(query, key, value, call, None, return_lse)

    def _batched(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] | None = None,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> AttentionResult:
        left, right = edges(causal, window_size)
        masks, blind = None, None
        if mask is not None or key_padding_mask is not None:
            masks = masked_inputs(query, key, value, mask, key_padding_mask, causal, window_size)
            query, key, value, blind = masks.query, masks.key, masks.value, masks.blind
        elif count := leading_blind_rows(query.shape[1], key.shape[1], right):
            blind = (torch.arange(query.shape[1], device=query.device) < count)[None, None]
        call = KernelCall(
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            left=left,
            right=right,
            masks=masks,
            needs_lse=self._needs_lse(return_lse, options),
            **options,
        )
        return self._around(query, key, value, call, blind, return_lse)


class PackedKernel(KernelBackend):
    """An adapter whose `run` takes packed calls."""

    def forward_varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cu_seqlens_host: tuple[int, ...] | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
        cu_seqlens_k_host: tuple[int, ...] | None = None,
        metadata: AttentionMetadata | None = None,
        **options: Any,
    ) -> AttentionResult:
        """As `AttentionBackend.forward_varlen`; by hand, checked like a call of `varlen_attention`. `metadata` is made
        here where it is not given, once for its sequences.

        Raises:
            InvalidAttentionInputError, UnsupportedAttentionError: as there.
        """
        from hal_attn.validation import packed_request

        sequences = None if metadata is None else metadata.sequences
        if sequences is None:
            offsets = (cu_seqlens, max_seqlen, cu_seqlens_host, cu_seqlens_k, max_seqlen_k, cu_seqlens_k_host)
            sequences = _sequences(*offsets)
        request = packed_request(query, key, value, sequences, options)
        self._check(request)
        builder = self.metadata_builder()
        key_of = ("metadata", self, builder.key(request))
        given: dict[str, Any] = {**request.options(), **tensor_options(options)}
        given["metadata"] = sequences.memo(key_of, lambda: builder.build(sequences, request))
        return self._packed(query, key, value, **given)

    def unchecked(self, hook: str) -> Callable[..., Any]:
        return self._packed if hook == "forward_varlen" else super().unchecked(hook)

    def bind_varlen(self, request: AttentionRequest) -> Callable[..., AttentionResult] | None:
        builder, return_lse = self.metadata_builder(), request.return_lse
        key_of = ("metadata", self, builder.key(request))
        # As text, whose hash is made once: a request's would be made at each call.
        own_key = f"call of {self!r} {id(self)}: {request!r}"

        def call_for(sequences: PackedSequences) -> tuple[KernelCall, Tensor | None]:
            metadata = sequences.memo(key_of, lambda: builder.build(sequences, request))
            assert isinstance(metadata, PackedMetadata)
            return self._plain_call(request, metadata), None if metadata.blind is None else metadata.blind[None]

        def run(query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> AttentionResult:
            call, blind = sequences.memo(own_key, lambda: call_for(sequences))
            return self._around(query, key, value, call, blind, return_lse)

        return run

    def _packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        metadata: PackedMetadata,
        scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] | None = None,
        return_lse: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_host: tuple[int, ...] | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
        cu_seqlens_k_host: tuple[int, ...] | None = None,
        **options: Any,
    ) -> AttentionResult:
        # The offsets are those of the metadata.
        left, right = edges(causal, window_size)
        call = KernelCall(
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            left=left,
            right=right,
            needs_lse=self._needs_lse(return_lse, options),
            metadata=metadata,
            **options,
        )
        blind = None if metadata.blind is None else metadata.blind[None]
        return self._around(query, key, value, call, blind, return_lse)


def _sequences(
    cu_seqlens: Tensor,
    longest: int,
    host: tuple[int, ...] | None,
    cu_seqlens_k: Tensor | None,
    longest_k: int | None,
    host_k: tuple[int, ...] | None,
) -> PackedSequences:
    """The sequences of a packed hook that was called by hand, without metadata."""
    if host is not None:
        return PackedSequences.checked(cu_seqlens, cu_seqlens_k, host, host_k, ("cu_seqlens_host", "cu_seqlens_k_host"))
    offsets = check_offsets("cu_seqlens", cu_seqlens)
    offsets_k = offsets if cu_seqlens_k is None else check_offsets("cu_seqlens_k", cu_seqlens_k)
    return PackedSequences.from_device_offsets(
        offsets, offsets_k, int(longest), int(longest if longest_k is None else longest_k)
    )


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Sinks `[H]` joined to an attention without them: output `[..., S, H, Dv]`, LSE `[..., H, S]`, both as given.

    A sink is one more logit in the denominator, so the LSE grows and each row shrinks by what it grew.
    """
    joined = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    share = torch.exp(lse - joined).masked_fill(torch.isneginf(lse), 0.0).transpose(-1, -2).unsqueeze(-1)
    return (output * share).to(output.dtype), joined


def padded_head_dims(
    query: Tensor, key: Tensor, value: Tensor, multiple: int, alike: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with zeros up to the next `multiple` of their head dims, and all to one where `alike`: the
    scores stay as they are, and the output has zeros behind."""
    dim, value_dim = query.shape[-1], value.shape[-1]
    if dim == value_dim and not dim % multiple:
        return query, key, value
    if alike:
        dim = value_dim = max(dim, value_dim)
    dim, value_dim = (-(-d // multiple) * multiple for d in (dim, value_dim))
    return to_head_dim(query, dim), to_head_dim(key, dim), to_head_dim(value, value_dim)


def to_head_dim(tensor: Tensor, dim: int) -> Tensor:
    """`[..., D]` with zeros up to `dim`."""
    return tensor if tensor.shape[-1] == dim else F.pad(tensor, (0, dim - tensor.shape[-1]))
