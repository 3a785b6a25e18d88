"""The metadata of a packed batch on Ascend: its offsets as the operators take them, host integers."""

from __future__ import annotations

from dataclasses import dataclass

from hal_attn.errors import InvalidAttentionInputError
from hal_attn.kernels import PackedMetadata, PackedMetadataBuilder
from hal_attn.packing import PackedSequences
from hal_attn.request import AttentionRequest


@dataclass(frozen=True)
class AscendMetadata(PackedMetadata):
    """`PackedMetadata` with, as cumulative lengths without the leading 0, where each sequence ends.

    Attributes:
        ends_q, ends_k: of queries and keys.
        longest_q, longest_k: the longest by these ends; the `max_seqlen` of the sequences may be more.
        more_queries: some sequence has more queries than keys.
    """

    ends_q: tuple[int, ...] = ()
    ends_k: tuple[int, ...] = ()
    longest_q: int = 0
    longest_k: int = 0
    more_queries: bool = False


class AscendMetadataBuilder(PackedMetadataBuilder):
    """Makes `AscendMetadata`, once for each batch.

    The operators read offsets on the host. Where only the device knows them they are copied back here, which waits for
    the device: give host lengths or `cu_seqlens_host` to avoid that.
    """

    def build(self, sequences: PackedSequences, request: AttentionRequest) -> AscendMetadata:
        known = sequences
        if sequences.cu_seqlens_host is None:
            lengths_k = None if sequences.equal_lengths else sequences.lengths_k
            known = PackedSequences.from_lengths(sequences.lengths, lengths_k)
        if known.empty:
            raise _empty(known)
        blind = super().build(known, request).blind
        assert known.cu_seqlens_host is not None
        assert known.cu_seqlens_k_host is not None
        return AscendMetadata(
            sequences,
            request.device,
            blind,
            known.cu_seqlens_host[1:],
            known.cu_seqlens_k_host[1:],
            max(known.lengths, default=0),
            max(known.lengths_k, default=0),
            any(queries > keys for queries, keys in zip(known.lengths, known.lengths_k, strict=True)),
        )


def _empty(sequences: PackedSequences) -> InvalidAttentionInputError:
    """Only a hook called by hand brings them; what the operators do with empty sequences is open."""
    index = sequences.empty[0]
    return InvalidAttentionInputError(
        "cu_seqlens",
        f"sequence {index} with {sequences.lengths[index]} queries and {sequences.lengths_k[index]} keys",
        "by the operators of the platform ascend, only sequences with queries and keys",
        "varlen_attention answers it exactly with HAL_ATTN_EMPTY_SEQUENCES=compact",
    )
