"""`flashinfer_cudnn`: cuDNN's packed attention through FlashInfer, made for the vision encoders of serving systems."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hal_attn.backend import AttentionMetadataBuilder, AttentionResult
from hal_attn.capabilities import Capabilities
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.guard import attempt
from hal_attn.kernels import KernelCall, KernelResult, PackedKernel, PackedMetadata, PackedMetadataBuilder
from hal_attn.packing import PackedSequences
from hal_attn.portable.flash_rules import positive_scale_rule
from hal_attn.portable.generation import capability_rule
from hal_attn.portable.operators import aligned
from hal_attn.probing import has_parameter
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

FUNCTION = "cudnn_batch_prefill_with_kv_cache"
WORKSPACE_BYTES = 128 * 1024 * 1024
LEAST_BATCH = 8
LEAST_LENGTH = 128
# The options that came with later releases, by the parameter that each is passed as.
PARAMETERS = {"return_lse": "lse_base", "sinks": "lse_base", "window_size": "window_left"}


def bucketed(number: int, least: int) -> int:
    """The next power of two, `least` or more: cuDNN builds a plan for each batch size and longest length that it meets
    (55 ms to a second), and one plan serves every smaller one."""
    return max(least, 1 << max(number - 1, 0).bit_length())


@dataclass(frozen=True)
class RaggedMetadata(PackedMetadata):
    """A packed batch as cuDNN wants it, padded to its bucket with sequences of length 0.

    Attributes:
        batch: sequences with the padding; a power of two, 8 or more.
        longest, longest_k: powers of two, 128 or more.
        lengths, lengths_k: int32 `[batch, 1, 1, 1]`.
        starts, starts_k: rows at which sequences begin, int64 `[batch + 1]`; the padding begins where the rows end.
    """

    batch: int = 0
    longest: int = 0
    longest_k: int = 0
    lengths: Tensor = field(default_factory=lambda: torch.empty(0))
    lengths_k: Tensor = field(default_factory=lambda: torch.empty(0))
    starts: Tensor = field(default_factory=lambda: torch.empty(0))
    starts_k: Tensor = field(default_factory=lambda: torch.empty(0))
    _elements: dict[tuple[bool, int], Tensor] = field(default_factory=dict, repr=False)

    def elements(self, keys: bool, row: int) -> Tensor:
        """Where sequences begin, in elements of a tensor with `row` elements from one row to the next: int32
        `[batch + 1]`, multiplied in 64 bits, made once for all layers."""
        known = self._elements.get((keys, row))
        if known is None:
            known = self._elements[keys, row] = ((self.starts_k if keys else self.starts) * row).to(torch.int32)
        return known


class RaggedMetadataBuilder(PackedMetadataBuilder):
    """Makes `RaggedMetadata`, on the device alone: it never waits."""

    def build(self, sequences: PackedSequences, request: AttentionRequest) -> RaggedMetadata:
        packed = super().build(sequences, request)
        batch = bucketed(sequences.count, LEAST_BATCH)
        starts, starts_k = (_padded_starts(side, batch) for side in sequences.offsets(request.device))
        lengths, lengths_k = (side.diff().to(torch.int32).view(-1, 1, 1, 1) for side in (starts, starts_k))
        return RaggedMetadata(
            sequences,
            request.device,
            packed.blind,
            batch,
            bucketed(sequences.max_seqlen, LEAST_LENGTH),
            bucketed(sequences.max_seqlen_k, LEAST_LENGTH),
            lengths,
            lengths_k,
            starts,
            starts_k,
        )


class FlashInferCudnnBackend(PackedKernel):
    """`flashinfer.cudnn.prefill.cudnn_batch_prefill_with_kv_cache` (rules read from flashinfer-python 0.7.4).

    Its rules: packed calls in inference; float16 and bfloat16; compute capability 8.0; head dims padded to one multiple
    of 8, at most 128; causal and a left window aligned to the bottom right, windows only under causal. Offsets are
    int32 and count elements of each tensor's own memory, so that a tensor of 2^31 elements or more is refused. Lengths
    are `[B, 1, 1, 1]`. The LSE is `[Tq, H]`, in base 2 unless it is asked for in "ln". cuDNN before 9.27 loses part of
    the LSE of grouped heads where the longest length is 1, which the buckets never say. Without the Python package
    `cudnn` it falls back to a kernel with other rules, and is refused. A scale below 0 is right without causal (seen on
    an H200); what was not tried there, a scale of 0, or below 0 with causal, is refused.

    SGLang's vision layer demands lengths, the longest length and element offsets of its caller. Here they are derived
    from the offsets, once a batch; `sequence_lengths` may be given to `forward_varlen` and is checked against them.
    """

    name = "flashinfer_cudnn"
    distribution = "flashinfer-python"
    install = "pip install flashinfer-python nvidia-cudnn-frontend"
    head_dim_multiple = 8
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        max_head_dim=128,
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        sinks=True,
        lse=True,
    )

    def unavailable(self) -> Refusal | None:
        missing = super().unavailable()
        if missing is None and not getattr(self.library, "CUDNN_AVAILABLE", True):
            need = "the package nvidia-cudnn-frontend"
            return Refusal("installed", "flashinfer-python without cuDNN's Python package", need, self.install)
        return missing

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        refusals = super().refusals(request)
        refusals += capability_rule(self.architecture(request.device), 80, "cuDNN's attention")
        if request.causal or request.softmax_scale == 0:
            refusals += positive_scale_rule(request)
        if request.window_size is not None and not request.causal:
            refusals += (Refusal("window_size", str(request.window_size), "a window that ends at the diagonal"),)
        dim = bucketed_dim(max(request.head_dim, request.value_head_dim))
        sides = {"query": (request.tokens_q, request.heads), "key": (request.tokens_k, request.kv_heads)}
        for side, (tokens, heads) in sides.items():
            if tokens * heads * dim >= 2**31:
                have = f"{tokens * heads * dim} elements"
                refusals += (Refusal(side, have, "fewer than 2^31 elements, its offsets are int32"),)
        function = getattr(attempt(lambda: self.library, None)[0], FUNCTION, None)
        wanted = {"return_lse": request.return_lse, "window_size": request.window_size, "sinks": request.sinks}
        for option, parameter in PARAMETERS.items():
            if wanted[option] and function is not None and not has_parameter(function, parameter):
                have = f"flashinfer-python without {parameter}"
                refusals += (Refusal(option, have, "flashinfer-python 0.7.4 or later", self.install),)
        return refusals

    def metadata_builder(self) -> AttentionMetadataBuilder:
        return RaggedMetadataBuilder()

    def forward_varlen(
        self, query: Tensor, key: Tensor, value: Tensor, *, sequence_lengths: Tensor | None = None, **options: Any
    ) -> AttentionResult:
        """As every packed hook, and `sequence_lengths`, what SGLang calls the lengths of the sequences: integers `[N]`,
        or with further dimensions of size 1; followed by zeros where they are padded.

        Raises:
            InvalidAttentionInputError: `sequence_lengths` are not those of the offsets. Values on a device are compared
                where the host has the offsets, which waits.
        """
        if sequence_lengths is not None:
            _check_lengths(sequence_lengths, options["cu_seqlens"], options.get("cu_seqlens_host"))
        return super().forward_varlen(query, key, value, **options)

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        batch = call.metadata
        assert isinstance(batch, RaggedMetadata)
        query, key, value = (_countable(aligned(tensor, self.head_dim_multiple)) for tensor in (query, key, value))
        options: dict[str, Any] = {"lse_base": "ln"} if call.needs_lse else {}
        if call.left >= 0:
            options["window_left"] = call.left
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=query.device)
        output, lse = getattr(self.library, FUNCTION)(
            query,
            key,
            value,
            call.scale,
            workspace,
            max_token_per_sequence=batch.longest,
            max_sequence_kv=batch.longest_k,
            actual_seq_lens_q=batch.lengths,
            actual_seq_lens_kv=batch.lengths_k,
            causal=call.right == 0,
            return_lse=call.needs_lse,
            batch_offsets_q=batch.elements(False, query.stride(0)),
            batch_offsets_o=batch.elements(False, query.shape[1] * value.shape[2]),
            batch_offsets_k=batch.elements(True, key.stride(0)),
            batch_offsets_v=batch.elements(True, value.stride(0)),
            is_cuda_graph_compatible=True,
            **options,
        )
        return output, lse.transpose(0, 1) if call.needs_lse else None


def bucketed_dim(dim: int) -> int:
    """The head dim after the padding of the adapter."""
    return -(-dim // FlashInferCudnnBackend.head_dim_multiple) * FlashInferCudnnBackend.head_dim_multiple


def import_flashinfer() -> ModuleType:
    """The module of FlashInfer's cuDNN prefill."""
    return import_module("flashinfer.cudnn.prefill")


def _padded_starts(offsets: Tensor, batch: int) -> Tensor:
    """Offsets `[N + 1]` -> int64 `[batch + 1]`, with empty sequences at the end."""
    more = batch + 1 - offsets.shape[0]
    return torch.cat([offsets.long(), offsets[-1:].long().expand(more)])


def _countable(tensor: Tensor) -> Tensor:
    """Rows whose first elements int32 can count: those of a view with wide strides are brought together."""
    return tensor if tensor.shape[0] * tensor.stride(0) < 2**31 else tensor.contiguous()


def _check_lengths(given: Tensor, cu_seqlens: Tensor, host: tuple[int, ...] | None) -> None:
    count = cu_seqlens.numel() - 1
    found = given.flatten()
    if found.is_floating_point() or found.numel() < count:
        have = f"{given.dtype} of shape {tuple(given.shape)}"
        raise InvalidAttentionInputError("sequence_lengths", have, f"whole numbers, one for each of {count} sequences")
    if host is None:
        return
    values = found.tolist()
    lengths = [after - before for before, after in itertools.pairwise(host)] + [0] * (len(values) - count)
    if values != lengths:
        index = next(index for index, (have, need) in enumerate(zip(values, lengths, strict=True)) if have != need)
        raise InvalidAttentionInputError(
            "sequence_lengths",
            f"{values[index]} for sequence {index}",
            f"{lengths[index]}, as cu_seqlens has it",
            "leave it out: the lengths are derived from cu_seqlens",
        )
