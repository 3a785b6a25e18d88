"""`npu_prompt_flash_attention` and `npu_incre_flash_attention` on the CPU, as a 310P card has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal_attn_ascend.generations import Generation
from hal_attn_ascend.simulation import layouts
from hal_attn_ascend.simulation.device import LONGEST, require, require_generation
from hal_attn_ascend.simulation.numbers import Sequence, softmax

PROMPT = "npu_prompt_flash_attention"
INCREMENT = "npu_incre_flash_attention"


def prompt(arguments: dict[str, Any]) -> Tensor:
    """`npu_prompt_flash_attention` with all its arguments by name."""
    query, key = arguments["query"], arguments["key"]
    mask, before, after = arguments["atten_mask"], arguments["pre_tokens"], arguments["next_tokens"]
    _check(PROMPT, arguments, batch=128, length=65535)
    require(arguments["sparse_mode"] == 0, PROMPT, f"sparse_mode {arguments['sparse_mode']}")
    require(arguments["num_key_value_heads"] == 0, PROMPT, "num_key_value_heads")
    require(before == LONGEST and after in (0, LONGEST), PROMPT, f"pre_tokens {before}, next_tokens {after}")
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        require(arguments[name] is None, PROMPT, name)
    layout = arguments["input_layout"]
    ends = (layouts.lengths_of(query, layout)[0], layouts.lengths_of(key, layout)[0])
    if mask is not None:
        require(mask.dtype in (torch.bool, torch.int8, torch.uint8), PROMPT, f"atten_mask of dtype {mask.dtype}")
        require(mask.is_contiguous(), PROMPT, "atten_mask is not contiguous")
        batch = query.shape[0]
        shapes = (ends, (batch, *ends), (1, *ends), (batch, 1, *ends), (1, 1, *ends))
        require(tuple(mask.shape) in shapes, PROMPT, f"atten_mask of shape {tuple(mask.shape)}")
    hidden = layouts.hidden_of_modes(0, mask, before, after, [ends] * query.shape[0])
    return _output(arguments, list(hidden))


def increment(arguments: dict[str, Any]) -> Tensor:
    """`npu_incre_flash_attention` with all its arguments by name."""
    _check(INCREMENT, arguments, batch=256, length=65536)
    query = arguments["query"]
    require(layouts.lengths_of(query, arguments["input_layout"])[0] == 1, INCREMENT, "more than one query")
    for name in ("atten_mask", "actual_seq_lengths", "block_table"):
        require(arguments[name] is None, INCREMENT, f"{name} is not simulated")
    return _output(arguments, [None] * query.shape[0])


def _check(name: str, arguments: dict[str, Any], batch: int, length: int) -> None:
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    layout = arguments["input_layout"]
    require_generation(name, Generation.INFERENCE_310P)
    require(layout in ("BSND", "BNSD"), name, f"input_layout {layout!r} is not simulated")
    require(query.dtype == key.dtype == value.dtype == torch.float16, name, f"dtype {query.dtype}")
    require(all(tensor.is_contiguous() for tensor in (query, key, value)), name, "a tensor is not contiguous")
    require(arguments["pse_shift"] is None, name, "pse_shift")
    seqlen_q, heads, dim = layouts.lengths_of(query, layout)
    seqlen_k, kv_heads, _ = layouts.lengths_of(key, layout)
    require(arguments["num_heads"] == heads <= 256, name, f"num_heads {arguments['num_heads']}, heads {heads}")
    require((arguments["num_key_value_heads"] or heads) == kv_heads, name, f"{kv_heads} key heads")
    require(key.shape == value.shape and key.shape[-1] == dim <= 512, name, f"head dims {dim}, {value.shape[-1]}")
    require(dim % 16 == 0, name, f"head dim {dim}")
    require(query.shape[0] <= batch and max(seqlen_q, seqlen_k) <= length, name, f"shape {tuple(query.shape)}")


def _output(arguments: dict[str, Any], hidden: list[Tensor | None]) -> Tensor:
    layout = arguments["input_layout"]
    inputs = (layouts.heads_first(arguments[name], layout, None) for name in ("query", "key", "value"))
    parts = []
    for q, k, v, unseen in zip(*inputs, hidden, strict=True):
        group = q.shape[0] // k.shape[0]
        k, v = (tensor.float().repeat_interleave(group, 0) for tensor in (k, v))
        sequence = Sequence(q.float(), k, v, arguments["scale_value"], unseen)
        parts.append(softmax(sequence, 0.0, valid=False).output)
    return layouts.in_layout(parts, layout).to(torch.float16)
