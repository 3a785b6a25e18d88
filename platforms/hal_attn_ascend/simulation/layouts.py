"""Layouts, offsets and masks, as torch_npu's operators read them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hal_attn_ascend.simulation.device import LONGEST, require

COMPRESSED = 2048


def heads_first(tensor: Tensor, layout: str, ends: Sequence[int] | None) -> list[Tensor]:
    """The tensor's sequences as `[N, S, D]`: batch entries of BSND and BNSD, packed ones of TND."""
    if layout == "BNSD":
        return list(tensor)
    if layout == "BSND":
        return list(tensor.transpose(1, 2))
    assert ends is not None
    return [tensor[begin:end].transpose(0, 1) for begin, end in itertools.pairwise((0, *ends))]


def in_layout(parts: list[Tensor], layout: str) -> Tensor:
    """`[N, S, D]` of each sequence -> a tensor of the layout; the inverse of `heads_first`."""
    if layout == "BNSD":
        return torch.stack(parts)
    if layout == "BSND":
        return torch.stack(parts).transpose(1, 2).contiguous()
    return torch.cat([part.transpose(0, 1) for part in parts])


def lengths_of(tensor: Tensor, layout: str) -> tuple[int, int, int]:
    """(sequence length, heads, head dim)."""
    axes = {"BNSD": (2, 1, 3), "BSND": (1, 2, 3), "TND": (0, 1, 2)}[layout]
    return tuple(tensor.shape[axis] for axis in axes)  # type: ignore[return-value]


def check_ends(ends: Sequence[int] | None, rows: int, operator: str, name: str) -> None:
    """Cumulative lengths on the host, without a leading 0, up to the number of rows."""
    require(ends is not None and len(ends) > 0, operator, f"{name} is required with TND")
    assert ends is not None
    require(all(after >= before for before, after in itertools.pairwise((0, *ends))), operator, f"{name} falls")
    require(ends[-1] == rows, operator, f"{name} ends at {ends[-1]}, not at the {rows} rows")


def check_compressed(mask: Tensor | None, operator: str) -> None:
    """Modes 2, 3 and 4 want one fixed triangle, True where hidden."""
    require(mask is not None, operator, "this sparse_mode needs the compressed atten_mask")
    assert mask is not None
    shapes = ((2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048))
    require(tuple(mask.shape) in shapes, operator, f"the compressed atten_mask is 2048 x 2048, not {tuple(mask.shape)}")
    triangle = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
    require(torch.equal(mask.reshape(COMPRESSED, COMPRESSED).bool(), triangle), operator, "atten_mask is no triangle")


def band_hidden(seqlen_q: int, seqlen_k: int, before: int, after: int, top_left: bool) -> Tensor:
    """Bool `[Sq, Sk]`: hidden by a band from `before` keys before the diagonal to `after` behind it."""
    shift = 0 if top_left else seqlen_k - seqlen_q
    ahead = torch.arange(seqlen_k)[None] - torch.arange(seqlen_q)[:, None] - shift
    return (ahead > after) | (ahead < -before)


def hidden_of_modes(
    mode: int, mask: Tensor | None, before: int, after: int, lengths: list[tuple[int, int]]
) -> Iterator[Tensor | None]:
    """What each sequence's `sparse_mode` hides: bool `[1 or N, Sq, Sk]`, None where nothing is.

    Without a mask, nothing is: the mode and the band count only beside one.
    """
    for index, (seqlen_q, seqlen_k) in enumerate(lengths):
        if mask is None:
            yield None
        elif mode in (2, 3):
            yield band_hidden(seqlen_q, seqlen_k, LONGEST, 0, top_left=mode == 2)[None]
        elif mode == 4:
            yield band_hidden(seqlen_q, seqlen_k, before, after, top_left=False)[None]
        else:
            full = mask.bool()
            full = full[None, None] if full.dim() == 2 else full[:, None] if full.dim() == 3 else full
            own = full[index if full.shape[0] > 1 else 0][:, :seqlen_q, :seqlen_k]
            yield own | band_hidden(seqlen_q, seqlen_k, before, after, top_left=True) if mode == 0 else own
