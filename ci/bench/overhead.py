"""What one call costs beyond the bare PyTorch call it ends in: tiny inputs, one thread, all calls interleaved.

python ci/bench/overhead.py [--json]; a peer that is installed (diffusers, transformers) is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from hal_attn_cpu.flash import CpuFlashBackend

import hal_attn
from hal_attn import PackedSequences

ROUNDS, CALLS = 25, 300


def calls() -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """The calls by name, and for each the bare call it is compared with."""
    query, key, value = (torch.randn(1, 8, 2, 32) for _ in range(3))
    swapped = tuple(tensor.transpose(1, 2) for tensor in (query, key, value))
    packed = (query[0], key[0], value[0])
    sequences = PackedSequences.from_lengths([8])
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kernel = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", kernel)

    def bare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
        output: torch.Tensor = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=None)[
            0
        ].transpose(1, 2)
        return output

    def nothing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
        return value

    table: dict[str, Callable[[], object]] = {
        "bare flash kernel": lambda: bare(query, key, value),
        "bare flash kernel, causal": lambda: bare(query, key, value, True),
        "bare flash kernel, packed": lambda: bare(packed[0][None], packed[1][None], packed[2][None])[0],
        "bare scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        ).transpose(1, 2),
        "attention": lambda: hal_attn.attention(query, key, value),
        "attention, causal": lambda: hal_attn.attention(query, key, value, causal=True),
        "varlen_attention": lambda: hal_attn.varlen_attention(*packed, sequences=sequences),
        "bare nothing": lambda: nothing(query, key, value),
    }
    compared = {
        "attention": "bare flash kernel",
        "attention, causal": "bare flash kernel, causal",
        "varlen_attention": "bare flash kernel, packed",
    }
    try:
        from diffusers.models.attention_dispatch import dispatch_attention_fn
    except ImportError:
        pass
    else:
        table["diffusers dispatch_attention_fn"] = lambda: dispatch_attention_fn(query, key, value)
        compared["diffusers dispatch_attention_fn"] = "bare scaled_dot_product_attention"
    try:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError:
        pass
    else:
        module = torch.nn.Module().eval()
        module.num_key_value_groups, module.is_causal = 1, False  # type: ignore[assignment]
        table["transformers sdpa_attention_forward"] = lambda: sdpa_attention_forward(module, *swapped, None)
        compared["transformers sdpa_attention_forward"] = "bare scaled_dot_product_attention"
    return table, compared


def with_a_kernel_that_does_nothing() -> float:
    """Microseconds of `attention` when the kernel returns at once: all that is left is the dispatch."""
    query, key, value = (torch.randn(1, 8, 2, 32) for _ in range(3))
    original = CpuFlashBackend.bind
    CpuFlashBackend.bind = lambda self, request: lambda q, k, v: v  # type: ignore[method-assign,assignment,misc]
    try:
        # An option that no other call here has, so that the bound call of this kernel is its own.
        return statistics.median(
            _time(lambda: hal_attn.attention(query, key, value, scale=0.123)) for _ in range(ROUNDS)
        )
    finally:
        CpuFlashBackend.bind = original  # type: ignore[method-assign]


def _time(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    table, compared = calls()
    with torch.no_grad():
        times: dict[str, list[float]] = {name: [] for name in table}
        for call in table.values():
            _time(call)
        for _ in range(ROUNDS):
            for name, call in table.items():
                times[name].append(_time(call))
        nothing = with_a_kernel_that_does_nothing()
    median = {name: statistics.median(found) for name, found in times.items()}
    rows = [(name, us, us - median[compared[name]] if name in compared else None) for name, us in median.items()]
    rows.append(("attention, a kernel that does nothing", nothing, nothing - median["bare nothing"]))
    if as_json:
        print(json.dumps([{"call": name, "us": us, "over_bare_us": over} for name, us, over in rows], indent=1))
        return
    print(f"PyTorch {torch.__version__}, one thread, median of {ROUNDS} rounds of {CALLS} calls")
    for name, us, over in rows:
        print(f"{name:40s} {us:8.2f} us" + ("" if over is None else f"   {over:+6.2f} us over the bare call"))


if __name__ == "__main__":
    main()
