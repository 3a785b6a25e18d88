"""Ten deliberate faults, each put into a copy of a backend that is right, and what the kit says of each.

`python -m tests.conformance.faults` prints the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hal_attn_cpu.platform import CpuPlatform

from hal_attn.testing import BackendReport, check_backend
from tests.conformance.working import Working


class ScaleIgnored(Working):
    """The scores are always divided by sqrt(D)."""

    def attend(self, query, key, value, *, scale=None, **options):
        return super().attend(query, key, value, **options)


class MaskInverted(Working):
    """A bool mask is read as True = hidden, as PyTorch's modules and CANN do."""

    def attend(self, query, key, value, *, mask=None, **options):
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask
        return super().attend(query, key, value, mask=mask, **options)


class TopLeftCausal(Working):
    """Query i sees keys j <= i, whatever the lengths."""

    def attend(self, query, key, value, *, causal=False, mask=None, **options):
        if causal:
            triangle = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()
            if mask is None:
                mask = triangle[None, None]
            else:
                mask = mask & triangle if mask.dtype == torch.bool else mask.masked_fill(~triangle, -torch.inf)
        return super().attend(query, key, value, mask=mask, **options)


class WindowOffByOne(Working):
    """The left edge is exclusive."""

    def attend(self, query, key, value, *, window_size=None, **options):
        if window_size is not None and window_size[0] > 0:
            window_size = (window_size[0] - 1, window_size[1])
        return super().attend(query, key, value, window_size=window_size, **options)


class LseInBase2(Working):
    """The LSE as kernels that use exp2 keep it."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        return output, lse / math.log(2)


class InfiniteEmptyRows(Working):
    """The LSE of a query that sees no key is +inf, as FlashAttention has it."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        return output, torch.where(torch.isneginf(lse), torch.inf, lse)


class HeadsMappedWrongly(Working):
    """Query head h reads key head h % Hkv, not h // (H // Hkv)."""

    def attend(self, query, key, value, **options):
        heads = [head % key.shape[2] for head in range(query.shape[2])]
        return super().attend(query, key[:, :, heads], value[:, :, heads], **options)


class LeakAcrossSequences(Working):
    """The keys of a packed sequence end one row too late."""

    def rows(self, offsets, index):
        return slice(offsets[index], min(offsets[index + 1] + 1, offsets[-1]))


class ArgumentDropped(Working):
    """softcap is taken and forgotten."""

    def attend(self, query, key, value, *, softcap=0.0, **options):
        return super().attend(query, key, value, **options)


class NarrowAccumulation(Working):
    """The weighted sum of the values is kept in the dtype of the inputs, one key after the other."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        plain = not any(given is not None for given in options.values())
        if not plain or query.dtype not in (torch.float16, torch.bfloat16) or query.shape[2] != key.shape[2]:
            return output, lse
        scores = torch.einsum("bqhd,bkhd->bqhk", query.float(), key.float()) / math.sqrt(query.shape[-1])
        weights = scores.softmax(-1).to(query.dtype)
        total = torch.zeros_like(output)
        for index in range(key.shape[1]):
            total = total + weights[..., index, None] * value[:, None, index]
        return total, lse


@dataclass(frozen=True)
class Fault:
    """A fault, the rule of the kit that it breaks, and what the message must say."""

    backend: type[Working]
    rule: str
    says: str


FAULTS = {
    "scale ignored": Fault(ScaleIgnored, "scale", "scale is ignored"),
    "mask inverted": Fault(MaskInverted, "masks", "the bool mask is inverted"),
    "top-left causal": Fault(TopLeftCausal, "visible keys", "the band hangs from the top left"),
    "window off by one": Fault(WindowOffByOne, "visible keys", "the window's left edge is one too small"),
    "LSE in base 2": Fault(LseInBase2, "LSE", "the LSE is in base 2"),
    "+inf for empty rows": Fault(InfiniteEmptyRows, "blind rows", "has LSE inf, right is -inf"),
    "heads mapped wrongly": Fault(HeadsMappedWrongly, "heads", "query head h reads key head h % Hkv"),
    "leak across sequences": Fault(LeakAcrossSequences, "packed", "a sequence sees the first key of the next one"),
    "argument dropped": Fault(ArgumentDropped, "softcap", "softcap is ignored"),
    "wrong dtype accumulation": Fault(NarrowAccumulation, "precision", "sums over the keys are kept in bfloat16"),
}


def report_of(name: str) -> BackendReport:
    """What the kit finds in the fault of that name, on the CPU."""
    return check_backend(FAULTS[name].backend(), CpuPlatform(), "cpu")


def main() -> None:
    """Prints what each fault breaks and the first message that says so."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    torch.set_num_threads(1)
    table = Table("fault", "failed", "rule", "message", title="Deliberate faults", show_lines=True)
    for name in FAULTS:
        checks = report_of(name).checks
        failed = [check for check in checks if check.status == "failed"]
        first = next((check for check in failed if check.rule == FAULTS[name].rule), None)
        told = ("NOT CAUGHT", "") if first is None else (first.rule, escape(f"{first.name}: {first.message}"))
        table.add_row(name, f"{len(failed)} of {len(checks)}", *told)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
