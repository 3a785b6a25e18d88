"""The calls of `hal_attn` whose cost is measured, each beside the bare call that it ends in, on tiny inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hal_attn.bench import nothing
from hal_attn.bench.timing import Call
from hal_attn.bench.vendor import vendor_call
from hal_attn.functional import attention, explain, varlen_attention
from hal_attn.guard import attempt
from hal_attn.packing import PackedSequences
from hal_attn.selection import Selection

DENSE_MARK, PACKED_MARK = 2.0, 3.0
KERNEL_OF_CPU = "ending in PyTorch's kernel for the CPU"
SDPA = "ending in PyTorch's scaled_dot_product_attention"
NOTHING = "with a kernel that does nothing"
BARE_SDPA = "bare scaled_dot_product_attention"
BARE_NOTHING = "bare kernel that does nothing"
LENGTHS = [3, 5]


@dataclass(frozen=True)
class Timed:
    """A call to be timed.

    Attributes:
        name: unique in a measurement.
        group: the kernel that it ends in; what is compared stands together.
        over: the name of the bare call that it ends in; None where it is one.
        ours: not a peer's and not bare.
        mark: microseconds beyond the bare call that are to be kept.
        below: the name of the call whose own time beyond the bare one is the mark.
        around: what holds while it is called, outside the time that is taken.
    """

    name: str
    group: str
    call: Call
    over: str | None = None
    ours: bool = False
    mark: float | None = None
    below: str | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def tiny(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value `[1, 8, 2, D]`: float32 and D = 32 on the CPU, bfloat16 and D = 64 elsewhere."""
    dtype, dim = (torch.float32, 32) if device.type == "cpu" else (torch.bfloat16, 64)
    query, key, value = (torch.randn(1, sum(LENGTHS), 2, dim, dtype=dtype, device=device) for _ in range(3))
    return query, key, value


def of_cpu() -> Iterator[Timed]:
    """Calls that end in the CPU's own kernel, which is called with the same transposes as the bare call."""
    query, key, value = tiny(torch.device("cpu"))
    one = PackedSequences.from_lengths([sum(LENGTHS)])
    packed = (query[0], key[0], value[0])
    kernel = getattr(
        torch,
        "_scaled_dot_product_flash_attention_for_cpu",
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    )

    def bare(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        output: Tensor = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=None)[0]
        return output.transpose(1, 2)

    dense, causal, flat = "bare kernel", "bare kernel, causal", "bare kernel, packed"
    of_kernel = partial(Timed, group=KERNEL_OF_CPU)
    ours = partial(of_kernel, ours=True)
    yield of_kernel(name=dense, call=lambda: bare(query, key, value))
    yield of_kernel(name=causal, call=lambda: bare(query, key, value, True))
    yield of_kernel(name=flat, call=lambda: bare(packed[0][None], packed[1][None], packed[2][None])[0])
    yield ours(name="attention", call=lambda: attention(query, key, value), over=dense, mark=DENSE_MARK)
    yield ours(
        name="attention, causal",
        call=lambda: attention(query, key, value, causal=True),
        over=causal,
        mark=DENSE_MARK,
    )
    yield ours(
        name="varlen_attention, PackedSequences",
        call=lambda: varlen_attention(*packed, sequences=one),
        over=flat,
        mark=PACKED_MARK,
    )
    yield ours(
        name="varlen_attention, cu_seqlens",
        call=lambda: varlen_attention(*packed, cu_seqlens=one.cu_seqlens, max_seqlen=one.max_seqlen),
        over=flat,
    )


def bare_sdpa(device: torch.device) -> Timed:
    """What diffusers and transformers end in where nothing else is asked for."""
    query, key, value = tiny(device)
    return Timed(
        BARE_SDPA,
        SDPA,
        lambda: F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        ).transpose(1, 2),
    )


def of_nothing(diffusers: str | None) -> Iterator[Timed]:
    """Calls of a kernel that returns at once: all that is left is the dispatch. `diffusers` is the mark, where it is
    installed."""
    query, key, value = tiny(torch.device("meta"))
    packed = (query[0], key[0], value[0])
    sequences = PackedSequences.from_lengths(LENGTHS)
    framed = nothing.FramedNothingBackend.name
    ours = partial(Timed, group=NOTHING, over=BARE_NOTHING, ours=True, around=nothing.undisturbed)
    yield Timed(BARE_NOTHING, NOTHING, lambda: nothing.nothing(query, key, value))
    yield ours(
        name="attention, nothing",
        call=lambda: attention(query, key, value),
        below=diffusers,
    )
    yield ours(
        name="varlen_attention, nothing",
        call=lambda: varlen_attention(*packed, sequences=sequences),
    )
    yield ours(
        name="attention, nothing in the frame of vendors",
        call=lambda: attention(query, key, value, backend=framed),
    )
    yield ours(
        name="varlen_attention, nothing in the frame",
        call=lambda: varlen_attention(*packed, sequences=sequences, backend=framed),
    )


def of_backends(device: torch.device) -> tuple[list[Timed], list[str]]:
    """Calls of each backend that takes them on `device`, beside the vendor's own call; and what failed, and why."""
    query, key, value = (tensor.to(torch.bfloat16) for tensor in tiny(device))
    sequences = PackedSequences.from_lengths(LENGTHS, device=device)
    flat = (query[0], key[0], value[0])
    found: list[Timed] = []
    notes: list[str] = []
    with torch.no_grad():
        for form, tensors, given in (("attention", (query, key, value), None), ("varlen_attention", flat, sequences)):
            options: dict[str, Any] = {} if given is None else {"sequences": given}
            selection = explain(*tensors, **options)
            for candidate in selection.considered:
                if candidate.refusals:
                    continue
                name = candidate.backend.name
                calls, failure = attempt(partial(_beside_vendor, selection, name, form, tensors, given), ())
                found += calls
                if failure:
                    notes.append(f"{form}, {name}: failed: {failure}")
    return found, notes


def _beside_vendor(
    selection: Selection,
    name: str,
    form: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    sequences: PackedSequences | None,
) -> list[Timed]:
    backend = next(candidate.backend for candidate in selection.considered if candidate.backend.name == name)

    def ours() -> object:
        if sequences is None:
            return attention(*tensors, backend=name)
        return varlen_attention(*tensors, sequences=sequences, backend=name)

    ours()
    group = f"{form} on {tensors[0].device.type}, ending in each vendor's own call"
    bare = vendor_call(backend, selection.request, *tensors, sequences)
    if bare is None:
        return [Timed(f"{form}, {name}", group, ours, ours=True)]
    bare()
    over = f"vendor's own, {form}, {name}"
    return [Timed(over, group, bare), Timed(f"{form}, {name}", group, ours, over, ours=True)]
