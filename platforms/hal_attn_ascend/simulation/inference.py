"""`npu_fused_infer_attention_score`, both versions, on the CPU, under the rules of their documentation."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal_attn_ascend.generations import Generation
from hal_attn_ascend.simulation import layouts
from hal_attn_ascend.simulation.device import CURRENT, LONGEST, require, require_generation
from hal_attn_ascend.simulation.numbers import Sequence, softmax

Ends = SequenceOf[int] | None
# (D, Dv) in TND: the second version also has 64.
PACKED_DIMS = {1: {(128, 128), (192, 128), (192, 192)}, 2: {(64, 64), (128, 128), (192, 128), (192, 192)}}
MAX_TOKENS = {1: 65536, 2: 2**20}


class Options(NamedTuple):
    """The arguments that are simulated, under one name in both versions."""

    version: int
    heads: int
    kv_heads: int
    scale: float
    before: int
    after: int
    layout: str
    mode: int
    inner_precise: int
    lse: bool
    lengths_q: Ends
    lengths_k: Ends
    sink: Tensor | None = None

    @property
    def name(self) -> str:
        return "npu_fused_infer_attention_score" + ("_v2" if self.version == 2 else "")


# What the versions call the arguments, where not alike.
FIRST = {"heads": "num_heads", "scale": "scale", "lse": "softmax_lse_flag"}
FIRST |= {"lengths_q": "actual_seq_lengths", "lengths_k": "actual_seq_lengths_kv"}
SECOND = {"heads": "num_query_heads", "scale": "softmax_scale", "lse": "return_softmax_lse"}
SECOND |= {"lengths_q": "actual_seq_qlen", "lengths_k": "actual_seq_kvlen", "sink": "learnable_sink"}
BOTH = {"kv_heads": "num_key_value_heads", "before": "pre_tokens", "after": "next_tokens", "layout": "input_layout"}
BOTH |= {"mode": "sparse_mode", "inner_precise": "inner_precise"}


def first_version(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """`npu_fused_infer_attention_score` with all its arguments by name."""
    return _infer(arguments, Options(version=1, **{to: arguments[name] for to, name in (FIRST | BOTH).items()}))


def second_version(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """`npu_fused_infer_attention_score_v2` with all its arguments by name."""
    return _infer(arguments, Options(version=2, **{to: arguments[name] for to, name in (SECOND | BOTH).items()}))


def _infer(arguments: dict[str, Any], options: Options) -> tuple[Tensor, Tensor]:
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    mask, pse = arguments["atten_mask"], arguments["pse_shift"]
    _check(query, key, value, mask, pse, options)
    packed = options.layout == "TND"
    queries = layouts.heads_first(query, options.layout, options.lengths_q)
    keys = layouts.heads_first(key, options.layout, options.lengths_k)
    values = layouts.heads_first(value, options.layout, options.lengths_k)
    one_query = max(part.shape[1] for part in queries) == 1
    # With a single query the mode and the band count for nothing; a full mask still does.
    mode, before, after = (1, LONGEST, LONGEST) if one_query else (options.mode, options.before, options.after)
    if one_query and options.mode in (2, 3, 4):
        mask = None
    lengths = [(q.shape[1], k.shape[1]) for q, k in zip(queries, keys, strict=True)]
    hidden = layouts.hidden_of_modes(mode, mask, before, after, lengths)
    parts, lses = [], []
    for index, (q, k, v, unseen) in enumerate(zip(queries, keys, values, hidden, strict=True)):
        if not packed and options.lengths_k is not None:
            own = options.lengths_k[index if len(options.lengths_k) > 1 else 0]
            k, v = k[:, :own], v[:, :own]
            unseen = None if unseen is None else unseen[..., :own]
        group = q.shape[0] // k.shape[0]
        added = None if pse is None else pse[index if pse.shape[0] > 1 else 0].float()
        k, v = (tensor.float().repeat_interleave(group, 0) for tensor in (k, v))
        sink = None if options.sink is None else options.sink.float()
        result = softmax(
            Sequence(q.float(), k, v, options.scale, unseen, added, sink),
            CURRENT.get().empty_lse,
            options.inner_precise in (2, 3),
        )
        parts.append(result.output)
        lses.append(result.maximum + torch.log(result.total))
    output = layouts.in_layout(parts, options.layout).to(query.dtype)
    if not options.lse:
        return output, torch.zeros(1)
    lse = torch.cat(lses, 1).transpose(0, 1) if packed else torch.stack(lses)
    return output, lse.unsqueeze(-1).contiguous()


def _check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, pse: Tensor | None, options: Options
) -> None:
    name = options.name
    require_generation(name, Generation.A2, Generation.A3)
    require(options.layout in ("BSND", "BNSD", "TND"), name, f"input_layout {options.layout!r} is not simulated")
    require(query.dtype in (torch.float16, torch.bfloat16), name, f"dtype {query.dtype}")
    for tensor in (query, key, value, mask, pse):
        require(tensor is None or tensor.is_contiguous(), name, "a tensor is not contiguous")
    require(key.dtype == value.dtype == query.dtype, name, "query, key and value differ in dtype")
    heads, kv_heads = (layouts.lengths_of(tensor, options.layout)[1] for tensor in (query, key))
    require(options.heads == heads, name, f"told of {options.heads} query heads, but there are {heads}")
    require((options.kv_heads or heads) == kv_heads, name, f"told of {options.kv_heads} key heads, not {kv_heads}")
    require(heads % kv_heads == 0 and heads <= 256 and heads // kv_heads <= 64, name, f"{heads} over {kv_heads} heads")
    require(0 <= options.mode <= 4, name, f"sparse_mode {options.mode}")
    if options.layout == "TND":
        _check_packed(query, key, value, mask, pse, options)
    else:
        _check_batched(query, key, value, mask, options)


def _check_batched(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options) -> None:
    name = options.name
    seqlen_q, heads, dim = layouts.lengths_of(query, options.layout)
    seqlen_k = layouts.lengths_of(key, options.layout)[0]
    require(key.shape == value.shape and key.shape[-1] == dim, name, "key and value differ in shape")
    require(dim <= 512 and dim % 16 == 0, name, f"head dim {dim}")
    require(options.layout == "BNSD" or heads * dim < 65535, name, "N * D of 65535 or more in BSND")
    require(query.shape[0] <= 65536, name, f"batch {query.shape[0]}")
    require(seqlen_q > 1 or seqlen_k <= 262144, name, f"{seqlen_k} keys for one query")
    require(seqlen_q > 1 or options.inner_precise in (0, 1), name, "inner_precise 2 with one query")
    require(options.sink is None, name, "learnable_sink only in TND")
    require(options.lengths_q is None, name, "query lengths are not simulated")
    _check_mask(query, seqlen_q, seqlen_k, mask, options)


def _check_mask(query: Tensor, seqlen_q: int, seqlen_k: int, mask: Tensor | None, options: Options) -> None:
    if options.mode in (2, 3, 4):
        if seqlen_q > 1:
            layouts.check_compressed(mask, options.name)
        return
    require(options.mode != 1 or mask is not None, options.name, "sparse_mode 1 without atten_mask")
    if mask is not None:
        ends = (seqlen_q, seqlen_k)
        shapes = ((1, *ends), (query.shape[0], 1, *ends), (1, 1, *ends), ends)
        require(tuple(mask.shape) in shapes, options.name, f"atten_mask of shape {tuple(mask.shape)}")


def _check_packed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, pse: Tensor | None, options: Options
) -> None:
    name = options.name
    layouts.check_ends(options.lengths_q, query.shape[0], name, "query lengths")
    layouts.check_ends(options.lengths_k, key.shape[0], name, "key lengths")
    assert options.lengths_q is not None
    assert options.lengths_k is not None
    require(len(options.lengths_q) == len(options.lengths_k) <= 4096, name, "lengths differ in number or exceed 4096")
    pairs = list(
        zip(*(torch.tensor((0, *e)).diff().tolist() for e in (options.lengths_q, options.lengths_k)), strict=True)
    )
    require(all(queries and keys for queries, keys in pairs), name, "an empty sequence in TND")
    dims = (query.shape[-1], value.shape[-1])
    require(dims in PACKED_DIMS[options.version] and key.shape[-1] == dims[0], name, f"head dims {dims} in TND")
    require(max(query.shape[0], key.shape[0]) <= MAX_TOKENS[options.version], name, "too many rows in TND")
    require(pse is None, name, "pse in TND")
    require(options.inner_precise == 0 or query.dtype == torch.float16, name, "inner_precise in TND")
    require(options.inner_precise in (0, 1), name, "inner_precise in TND")
    require(options.mode in (0, 3, 4) and (options.mode == 0) == (mask is None), name, "mode and mask in TND")
    if mask is not None:
        layouts.check_compressed(mask, name)
    require(options.mode != 3 or all(queries <= keys for queries, keys in pairs), name, "more queries than keys")
    if options.sink is not None:
        right = options.sink.dtype == torch.bfloat16 and tuple(options.sink.shape) == (options.heads,)
        require(right and value.shape[-1] <= 128, name, "learnable_sink is bfloat16 [heads], with Dv at most 128")
