"""Which calls share a measurement.

Sizes count with a few leading bits, everything else exactly. On an H200 the ratio of two kernels' times turns by a
fifth with each doubling of the length, so lengths get five bits: those of one class differ by a sixteenth at most, so
that what is chosen for one of them is within 2 percent of the best for another. Skewed packed batches, which hardly
repeat, get two bits, so that a training run measures some tens of classes and not hundreds.
"""

from __future__ import annotations

import torch

from hal_attn.guard import attempt
from hal_attn.request import AttentionRequest

LENGTH_BITS, COUNT_BITS, SKEWED_BITS = 5, 4, 2


def shape_class(request: AttentionRequest) -> str:
    """The class of `request`, as text that a person can read."""
    options = sorted(f"{name}={value}" for name, value in request.options().items() if name != "scale")
    gradients = "+".join((*(("qkv",) if request.needs_grad else ()), *request.needs_option_grad))
    parts = [
        _sizes(request),
        f"h{request.heads}/{request.kv_heads}",
        f"d{request.head_dim}/{request.value_head_dim}",
        str(request.dtype).removeprefix("torch."),
        _mask(request),
        "padding" if request.key_padding_mask else "",
        "sinks" if request.sinks else "",
        f"alibi{request.alibi_slopes}" if request.alibi_slopes else "",
        f"grad={gradients}" if gradients else "",
        *options,
        *_modes(request),
    ]
    return " ".join(part for part in parts if part)


def _sizes(request: AttentionRequest) -> str:
    kind = "batched" if not request.packed else "packed" if request.uniform else "packed skewed"
    alike = request.uniform
    sizes = [
        ("b", request.batch, COUNT_BITS if alike else SKEWED_BITS),
        ("q", request.seqlen_q, LENGTH_BITS if alike else SKEWED_BITS),
        ("k", request.seqlen_k, LENGTH_BITS if alike else SKEWED_BITS),
    ]
    if not alike:
        sizes += [("tq", request.tokens_q, SKEWED_BITS), ("tk", request.tokens_k, SKEWED_BITS)]
    unequal = "" if request.equal_lengths else " unequal"
    return f"{kind}{unequal} " + " ".join(f"{name}{rounded(value, bits)}" for name, value, bits in sizes)


def rounded(value: int | None, bits: int) -> str:
    """`value` rounded up to `bits` leading bits; "?" where only the device knows it."""
    if value is None:
        return "?"
    step = 1 << max(0, value.bit_length() - bits)
    return str(-(-value // step) * step)


def _mask(request: AttentionRequest) -> str:
    """Its dtype and which dimensions it spreads over: a mask that is alike for all heads is read once."""
    if request.mask == "none" or request.mask_shape is None:
        return ""
    shape = ",".join("1" if size == 1 else name for name, size in zip("bhqk", request.mask_shape, strict=True))
    return f"mask={str(request.mask_dtype).removeprefix('torch.')}[{shape}]"


def _modes(request: AttentionRequest) -> list[str]:
    """Modes of the process that change what kernels do."""
    on_cpu = request.device.type == "cpu"
    precision = matmul_precision() if request.dtype == torch.float32 else "highest"
    return [
        f"threads={torch.get_num_threads()}" if on_cpu else "",
        "deterministic_mode" if torch.are_deterministic_algorithms_enabled() else "",
        f"matmul={precision}" if precision != "highest" else "",
    ]


def matmul_precision() -> str:
    """What float32 products are made of, by PyTorch's switch; "mixed" where it has been set in ways that exclude each
    other, which PyTorch refuses to answer."""
    return attempt(torch.get_float32_matmul_precision, "mixed")[0]
