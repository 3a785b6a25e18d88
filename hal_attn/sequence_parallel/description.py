"""What a plan is made for: lengths, band, replicated tokens and layout, checked and in one form; host values only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hal_attn.errors import InvalidAttentionInputError
from hal_attn.sequence_parallel.blocks import Band, without_idle_edges
from hal_attn.sequence_parallel.spans import deal
from hal_attn.sequence_parallel.whole import Tokens
from hal_attn.sequence_parallel.work import visible_to

Layout = Literal["auto", "contiguous", "zigzag"]
Masks = Literal["whole", "sharded"]
PerSequence = int | Sequence[int]

# In a window a zigzag sends more keys; it is taken where contiguous parts are more uneven than by so much.
_WORTH_IT = 1.05


@dataclass(frozen=True)
class Description:
    """One batch of sequences and how it is to be sharded.

    Attributes:
        lengths, lengths_k: query and key tokens of each sequence, replicated ones among them.
        batch: sequences of a dense plan, all of one length; None of a packed one.
        window_size: (left, right), -1 unlimited, with causal in it.
        zigzag, why: the layout of sequences that are cut, and the reason for it.
        whole: sequences may lie on one rank where others balance them.
        prefix, suffix: replicated tokens at both ends; key_prefix: replicated keys before these.
        masks: whether masks are given whole, or each rank's part.
    """

    lengths: tuple[int, ...]
    lengths_k: tuple[int, ...]
    batch: int | None
    window_size: tuple[int, int]
    zigzag: bool
    why: str
    whole: bool
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    key_prefix: tuple[int, ...]
    masks: Masks

    def band(self, sequence: int) -> Band:
        """The band of one sequence, aligned bottom right."""
        return Band(self.lengths_k[sequence] - self.lengths[sequence], *self.window_size)

    @property
    def own_tokens(self) -> tuple[Tokens, ...]:
        """Of each sequence."""
        ends = zip(self.prefix, self.suffix, self.key_prefix, strict=True)
        return tuple(
            Tokens(length - sum(end[:2]), length_k - sum(end), end)
            for length, length_k, end in zip(self.lengths, self.lengths_k, ends, strict=True)
        )

    @property
    def key_ends(self) -> tuple[int, ...]:
        """Replicated keys at the front of each sequence."""
        return tuple(first + second for first, second in zip(self.key_prefix, self.prefix, strict=True))


def describe(
    lengths: Sequence[int] | None,
    lengths_k: Sequence[int] | None,
    batch: int | None,
    seqlen: int | None,
    seqlen_k: int | None,
    *,
    coordinates: int,
    causal: bool,
    window_size: tuple[int | None, int | None] | None,
    layout: Layout,
    replicated_prefix: PerSequence,
    replicated_suffix: PerSequence,
    key_prefix: PerSequence,
    masks: Masks,
) -> Description:
    """The description of a packed batch (`lengths`) or a dense one (`batch`, `seqlen`), whose keys are exchanged by so
    many coordinates.

    Raises:
        InvalidAttentionInputError: an argument that cannot be, by its name.
    """
    if (lengths is None) == (batch is None or seqlen is None):
        raise InvalidAttentionInputError(
            "lengths", f"lengths={lengths!r}, batch={batch!r}, seqlen={seqlen!r}", "lengths, or batch and seqlen"
        )
    if lengths is None:
        assert batch is not None
        lengths = [_whole("seqlen", seqlen)] * _whole("batch", batch)
        lengths_k = None if seqlen_k is None else [_whole("seqlen_k", seqlen_k)] * len(lengths)
    own = tuple(_whole("lengths", length) for length in lengths)
    first = _each("key_prefix", key_prefix, len(own))
    keys = tuple(_whole("lengths_k", length) for length in lengths_k or ())
    if lengths_k is None:
        keys = tuple(length + more for length, more in zip(own, first, strict=True))
    if len(keys) != len(own):
        raise InvalidAttentionInputError("lengths_k", f"{len(keys)} sequences", f"as many as lengths has, {len(own)}")
    prefix = _each("replicated_prefix", replicated_prefix, len(own))
    suffix = _each("replicated_suffix", replicated_suffix, len(own))
    _check_room(own, keys, prefix, suffix, first)
    if masks not in get_args(Masks):
        raise InvalidAttentionInputError("masks", repr(masks), "'whole' or 'sharded'")
    asked = _band(causal, window_size)
    left, right = without_idle_edges(*asked, max(own, default=0), max(keys, default=0))
    # Causal stays causal, even of single queries.
    band = (left, right if asked[1] else 0)
    zigzag, why = _layout(layout, coordinates, band, list(zip(own, keys, strict=True)))
    whole = layout == "auto" and batch is None
    return Description(own, keys, batch, band, zigzag, why, whole, prefix, suffix, first, masks)


def _layout(
    layout: Layout, coordinates: int, band: tuple[int, int], sequences: Sequence[tuple[int, int]]
) -> tuple[bool, str]:
    if layout not in get_args(Layout):
        raise InvalidAttentionInputError("layout", repr(layout), "'auto', 'contiguous' or 'zigzag'")
    if layout != "auto":
        return layout == "zigzag", "asked for"
    if coordinates == 1:
        return False, "no keys are exchanged, so every layout does the same work"
    if band == (-1, 0):
        return True, "causal: the first tokens see few keys and the last see many, so each rank has some of both"
    if band == (-1, -1):
        return False, "every query sees every key, so any layout is balanced"
    contiguous, zigzag = (_most_work(sequences, coordinates, band, way) for way in (False, True))
    if contiguous > _WORTH_IT * zigzag:
        return True, "a long window: the first tokens see few keys and the last see many, so each rank has some of both"
    return False, "a window: each query sees keys near to it, which are then mostly at hand"


def _most_work(sequences: Sequence[tuple[int, int]], coordinates: int, band: tuple[int, int], zigzag: bool) -> int:
    """Of the coordinates, the most pairs of query and key, with every sequence cut."""
    pairs = [0] * coordinates
    for (queries, keys), count in Counter(sequences).items():
        for coordinate, spans in enumerate(deal(0, queries, coordinates, 0, zigzag)):
            pairs[coordinate] += count * sum(visible_to(*span, queries, keys, *band) for span in spans)
    return max(pairs)


def _band(causal: bool, window_size: tuple[int | None, int | None] | None) -> tuple[int, int]:
    edges = (None, None) if window_size is None else window_size
    if not isinstance(edges, (tuple, list)) or len(edges) != 2:
        raise InvalidAttentionInputError("window_size", repr(window_size), "a pair (left, right), or None")
    found = []
    for edge in edges:
        if edge is not None and (isinstance(edge, bool) or not isinstance(edge, int) or edge < -1):
            raise InvalidAttentionInputError("window_size", repr(window_size), "whole numbers of at least -1, or None")
        found.append(-1 if edge is None else edge)
    return found[0], 0 if causal else found[1]


def _each(name: str, value: PerSequence, count: int) -> tuple[int, ...]:
    """One number for every sequence, or one for each."""
    if isinstance(value, int):
        return (_whole(name, value),) * count
    numbers = tuple(_whole(name, number) for number in value)
    if len(numbers) != count:
        raise InvalidAttentionInputError(name, f"{len(numbers)} numbers", f"one, or one for each of {count} sequences")
    return numbers


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidAttentionInputError(name, repr(value), "whole numbers of at least 0, on the host")
    return value


def _check_room(
    lengths: tuple[int, ...],
    keys: tuple[int, ...],
    prefix: tuple[int, ...],
    suffix: tuple[int, ...],
    key_prefix: tuple[int, ...],
) -> None:
    for index, (queries, tokens, before, after, first) in enumerate(
        zip(lengths, keys, prefix, suffix, key_prefix, strict=True)
    ):
        if before + after > queries:
            raise InvalidAttentionInputError(
                "replicated_prefix",
                f"{before} + {after} replicated tokens",
                f"at most the {queries} of sequence {index}",
            )
        if first + before + after > tokens:
            raise InvalidAttentionInputError(
                "key_prefix",
                f"{first} + {before} + {after} replicated keys",
                f"at most the {tokens} keys of sequence {index}",
            )
