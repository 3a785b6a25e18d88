"""Which backend is tried first, by device generation and kind of call: a table, and where each row comes from."""

from __future__ import annotations

from dataclasses import dataclass

from hal_attn.portable.generation import compute_capability
from hal_attn.request import AttentionRequest

LAST = ("torch_efficient", "torch_math")


@dataclass(frozen=True)
class Row:
    """The order for some calls on some generations; of the rows that fit, the first counts.

    Attributes:
        generations: major compute capabilities; none means every one.
        calls: the calls, for people.
        order: backend names, best first; `LAST` follows.
        source: where that comes from.
        packed, causal, gradients: what the calls must be; None is either.
        below: the longest query and key length is below this; None is any.
    """

    generations: tuple[int, ...]
    calls: str
    order: tuple[str, ...]
    source: str
    packed: bool | None = None
    causal: bool | None = None
    gradients: bool | None = None
    below: int | None = None

    def fits(self, request: AttentionRequest, generation: int) -> bool:
        """Whether it is for calls like this one."""
        asked = ((self.packed, request.packed), (self.causal, request.causal), (self.gradients, request.wants_gradient))
        longest = max(request.seqlen_q or 0, request.seqlen_k or 0)
        return (
            (not self.generations or generation in self.generations)
            and all(want is None or want == have for want, have in asked)
            and (self.below is None or longest < self.below)
        )


_H200 = "measured on an H200, PyTorch 2.11, bfloat16, forward (docs/data/h200-kernels.json)"
_LIKE_H200 = "not measured with gradients; the forward pass was, on an H200"
_LONGER = "not measured at these lengths; 4,096 tokens and more were, on an H200"
_FA4_PAPER = "not measured here; published for B200, bfloat16: FlashAttention 4 before cuDNN 9.13 (arXiv:2603.05451)"
_NOT_MEASURED = "not measured; FlashAttention 2 was written for sm80"

_SHORT, _SHORT_FULL = (f"batched, {band}, fewer than 2,048 tokens" for band in ("causal", "full"))
_FA3_FIRST = ("flash_attn_3", "flash_attn_4", "torch_cudnn", "flash_attn", "torch_flash")
_FA3_PACKED = ("flash_attn_3", "flash_attn_4", "flashinfer_cudnn", "torch_cudnn", "flash_attn", "torch_flash")
_CUDNN_FIRST = ("torch_cudnn", "flash_attn_4", "flash_attn_3", "flash_attn", "torch_flash")
_BLACKWELL = ("flash_attn_4", "torch_cudnn", "flash_attn", "torch_flash")
_BLACKWELL_PACKED = ("flash_attn_4", "flashinfer_cudnn", "torch_cudnn", "flash_attn", "torch_flash")
_OTHERS = ("flash_attn", "torch_flash", "torch_cudnn", "flash_attn_3", "flash_attn_4", "flashinfer_cudnn")

# Where FlashAttention 4 is the fastest by up to 3 percent, 3 stays before it: 4 compiles at the first call of a kind.
TABLE = (
    Row((9,), "packed", _FA3_PACKED, _H200, packed=True, gradients=False),
    Row((9,), "packed, gradients", _FA3_PACKED, _LIKE_H200, packed=True),
    Row((9,), "batched", _FA3_FIRST, _H200, gradients=False),
    Row((9,), "batched, gradients", _FA3_FIRST, _LIKE_H200),
    Row((10, 11), "packed", _BLACKWELL_PACKED, _FA4_PAPER, packed=True),
    Row((10, 11), "batched", _BLACKWELL, _FA4_PAPER),
    Row((), "every", _OTHERS, _NOT_MEASURED),
)


def row_for(request: AttentionRequest, architecture: str) -> Row:
    """The row of the table for a request on a device generation ("sm90"); an unknown one counts as sm80."""
    generation = (compute_capability(architecture) or 80) // 10
    return next(row for row in TABLE if row.fits(request, generation))


def default_order(request: AttentionRequest, architecture: str) -> tuple[str, ...]:
    """Backend names, best first; those that the device cannot run refuse by themselves."""
    return (*row_for(request, architecture).order, *LAST)
