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
        packed, gradients: what the calls must be; None is either.
        below: the longest query and key length is below this; None is any.
    """

    generations: tuple[int, ...]
    calls: str
    order: tuple[str, ...]
    source: str
    packed: bool | None = None
    gradients: bool | None = None
    below: int | None = None

    def fits(self, request: AttentionRequest, generation: int) -> bool:
        """Whether it is for calls like this one."""
        asked = ((self.packed, request.packed), (self.gradients, request.wants_gradient))
        longest = max(request.seqlen_q or 0, request.seqlen_k or 0)
        return (
            (not self.generations or generation in self.generations)
            and all(want is None or want == have for want, have in asked)
            and (self.below is None or longest < self.below)
        )


_H200 = "measured on an H200, forward, bfloat16, PyTorch 2.11 (docs/data/h200-kernels.json and -more.json)"
_GRADIENTS = (
    "measured on an H200, forward and backward, bfloat16, PyTorch 2.11, without FlashAttention 3 "
    "(docs/data/h200-kernels-gradients.json)"
)
_FA4_PAPER = "not measured here; published for B200, bfloat16: FlashAttention 4 before cuDNN 9.13 (arXiv:2603.05451)"
_NOT_MEASURED = "not measured; FlashAttention 2 was written for sm80"

# FlashAttention 4 takes the host longer than cuDNN: with little to compute it comes after it. flashinfer_cudnn was not
# measured; it has cuDNN's packed kernel, where torch_cudnn pads.
_SHORT = ("flash_attn_3", "flashinfer_cudnn", "torch_cudnn", "flash_attn_4", "flash_attn", "torch_flash")
_LONG = ("flash_attn_3", "flash_attn_4", "flashinfer_cudnn", "torch_cudnn", "flash_attn", "torch_flash")
_BLACKWELL = ("flash_attn_4", "flashinfer_cudnn", "torch_cudnn", "flash_attn", "torch_flash")
_OTHERS = ("flash_attn", "torch_flash", "torch_cudnn", "flash_attn_3", "flash_attn_4", "flashinfer_cudnn")

# Where FlashAttention 4 is the fastest by up to 3 percent, 3 stays before it: 4 compiles at the first call of a kind.
TABLE = (
    Row((9,), "gradients", _LONG, _GRADIENTS, gradients=True),
    Row((9,), "packed, fewer than 1,024 tokens", _SHORT, _H200, packed=True, below=1024),
    Row((9,), "batched, fewer than 2,048 tokens", _SHORT, _H200, packed=False, below=2048),
    Row((9,), "others", _LONG, _H200),
    Row((10, 11), "every", _BLACKWELL, _FA4_PAPER),
    Row((), "every", _OTHERS, _NOT_MEASURED),
)


def row_for(request: AttentionRequest, architecture: str) -> Row:
    """The row of the table for a request on a device generation ("sm90"); an unknown one counts as sm80."""
    generation = (compute_capability(architecture) or 80) // 10
    return next(row for row in TABLE if row.fits(request, generation))


def default_order(request: AttentionRequest, architecture: str) -> tuple[str, ...]:
    """Backend names, best first; those that the device cannot run refuse by themselves."""
    return (*row_for(request, architecture).order, *LAST)
