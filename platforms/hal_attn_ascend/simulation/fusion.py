"""`npu_fusion_attention` and its gradient on the CPU, under the rules of its documentation and sources."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal_attn_ascend.generations import Generation
from hal_attn_ascend.simulation import layouts
from hal_attn_ascend.simulation.device import CURRENT, require, require_generation
from hal_attn_ascend.simulation.numbers import Sequence, gradients, softmax

NAME = "npu_fusion_attention"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Arguments = dict[str, Any]
Ends = SequenceOf[int] | None
# What the operators call the fields of Options, where both say the same and every release has it.
NAMES = {"heads": "head_num", "layout": "input_layout", "before": "pre_tockens", "after": "next_tockens"}
NAMES |= {"ends_q": "actual_seq_qlen", "ends_k": "actual_seq_kvlen", "mode": "sparse_mode"}
NAMES |= {"keep_prob": "keep_prob", "inner_precise": "inner_precise"}
Forward = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


class Options(NamedTuple):
    """What forward and backward share."""

    heads: int
    layout: str
    scale: float
    keep_prob: float
    before: int
    after: int
    inner_precise: int
    ends_q: Ends
    ends_k: Ends
    mode: int
    softmax_layout: str
    seed: int

    @classmethod
    def of(cls, arguments: Arguments, scale: str) -> Options:
        """From the arguments by name; `scale` is what the operator calls it, and old releases lack the last two."""
        given = {to: arguments[name] for to, name in NAMES.items()}
        layout, seed = arguments.get("softmax_layout", ""), arguments.get("seed", 0)
        return cls(scale=arguments[scale], softmax_layout=layout, seed=seed, **given)


def forward(arguments: Arguments) -> Forward:
    """`npu_fusion_attention` with all its arguments by name. Seven results: output, maximum and sum (each number eight
    times), a placeholder, and the dropout's seed, offset and size."""
    require_generation(NAME, Generation.A2, Generation.A3, Generation.ASCEND_950)
    for name in ("padding_mask", "prefix", "dropout_mask"):
        require(arguments.get(name) is None, NAME, f"{name} is not simulated")
    options = Options.of(arguments, "scale")
    if options.keep_prob < 1.0 and options.seed == 0:
        options = options._replace(seed=int(torch.randint(1, 2**31, ())))
    _check(arguments, options)
    parts, maxima, sums = [], [], []
    for sequence in _sequences(arguments, options):
        more = sequence.query.shape[1] > sequence.key.shape[1]
        valid = options.inner_precise == 2 or (options.mode == 3 and more)
        result = softmax(sequence, CURRENT.get().empty_lse, valid)
        parts.append(result.output)
        maxima.append(result.maximum)
        sums.append(result.total)
    query = arguments["query"]
    output = layouts.in_layout(parts, options.layout).to(query.dtype)
    numbers = (_eightfold(maxima, options), _eightfold(sums, options))
    return output, *numbers, query.new_empty(0), options.seed, 0, output.numel() if options.keep_prob < 1.0 else 0


def gradient(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`npu_fusion_attention_grad` with all its arguments by name: gradients of query, key, value, pse (not simulated:
    empty) and sink, from what the forward pass left."""
    options = Options.of(arguments, "scale_value")
    query, key, sink = arguments["query"], arguments["key"], arguments.get("sink")
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    of_sink = torch.zeros(0) if sink is None else torch.zeros_like(sink)
    saved = zip(
        _sequences(arguments, options),
        layouts.heads_first(arguments["dy"], options.layout, options.ends_q),
        layouts.heads_first(arguments["attention_in"], options.layout, options.ends_q),
        _onefold(arguments["softmax_max"], options),
        _onefold(arguments["softmax_sum"], options),
        strict=True,
    )
    group = options.heads // layouts.lengths_of(key, options.layout)[1]
    for sequence, of_output, output, maximum, total in saved:
        found = gradients(sequence, of_output.float(), output.float(), maximum, total)
        parts[0].append(found.query)
        parts[1].append(found.key.unflatten(0, (-1, group)).sum(1))
        parts[2].append(found.value.unflatten(0, (-1, group)).sum(1))
        of_sink = of_sink if found.sink is None else of_sink + found.sink
    first, second, third = (layouts.in_layout(part, options.layout).to(query.dtype) for part in parts)
    return first, second, third, query.new_empty(0), of_sink


def _sequences(arguments: Arguments, options: Options) -> list[Sequence]:
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    pse, atten_mask, sink = (arguments.get(name) for name in ("pse", "atten_mask", "sink"))
    queries = layouts.heads_first(query, options.layout, options.ends_q)
    keys = layouts.heads_first(key, options.layout, options.ends_k)
    values = layouts.heads_first(value, options.layout, options.ends_k)
    lengths = [(q.shape[1], k.shape[1]) for q, k in zip(queries, keys, strict=True)]
    hidden = layouts.hidden_of_modes(options.mode, atten_mask, options.before, options.after, lengths)
    generator = torch.Generator().manual_seed(options.seed)
    found = []
    for index, (q, k, v, unseen) in enumerate(zip(queries, keys, values, hidden, strict=True)):
        group = options.heads // k.shape[0]
        keep = None
        if options.keep_prob < 1.0:
            drawn = torch.rand(options.heads, q.shape[1], k.shape[1], generator=generator)
            keep = (drawn < options.keep_prob).float() / options.keep_prob
        k, v = (tensor.float().repeat_interleave(group, 0) for tensor in (k, v))
        added = None if pse is None else pse[index if pse.shape[0] > 1 else 0].float()
        found.append(Sequence(q.float(), k, v, options.scale, unseen, added, sink, keep))
    return found


def _eightfold(numbers: list[Tensor], options: Options) -> Tensor:
    """`[N, S]` of each sequence -> `[B, N, S, 8]`; packed `[T, N, 8]`, in whose memory, unless `softmax_layout` is TND,
    the blocks `[N, S_i, 8]` follow one another."""
    eight = [part.unsqueeze(-1).expand(*part.shape, 8) for part in numbers]
    if options.layout != "TND":
        return torch.stack(eight).contiguous()
    if options.softmax_layout == "TND":
        return torch.cat([part.transpose(0, 1) for part in eight]).contiguous()
    return torch.cat([part.reshape(-1, 8) for part in eight]).view(-1, options.heads, 8)


def _onefold(numbers: Tensor, options: Options) -> list[Tensor]:
    """The inverse of `_eightfold`."""
    if options.layout != "TND":
        return list(numbers[..., 0])
    assert options.ends_q is not None
    lengths = torch.tensor((0, *options.ends_q)).diff().tolist()
    if options.softmax_layout == "TND":
        return [part.transpose(0, 1) for part in numbers[..., 0].split(lengths)]
    blocks = numbers.reshape(-1, 8)[:, 0].split([options.heads * length for length in lengths])
    return [block.view(options.heads, -1) for block in blocks]


def _check(arguments: Arguments, options: Options) -> None:
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    pse, mask, sink = (arguments.get(name) for name in ("pse", "atten_mask", "sink"))
    require(options.layout in ("BSND", "BNSD", "TND"), NAME, f"input_layout {options.layout!r} is not simulated")
    packed = options.layout == "TND"
    require(query.dim() == (3 if packed else 4), NAME, f"{query.dim()} dimensions in layout {options.layout}")
    require(query.dtype in DTYPES, NAME, f"dtype {query.dtype}")
    for tensor in (key, value, *([] if pse is None else [pse])):
        require(tensor.dtype == query.dtype, NAME, "query, key, value and pse differ in dtype")
    seqlen_q, heads, dim = layouts.lengths_of(query, options.layout)
    seqlen_k, kv_heads, key_dim = layouts.lengths_of(key, options.layout)
    require(options.heads == heads, NAME, f"head_num {options.heads}, but query has {heads} heads")
    require(heads % kv_heads == 0 and heads <= 256, NAME, f"{heads} heads over {kv_heads} key heads")
    require(dim == key_dim and value.shape[-1] <= dim <= 768, NAME, f"head dims {dim}, {key_dim}, {value.shape[-1]}")
    require(0.0 < options.keep_prob <= 1.0, NAME, f"keep_prob {options.keep_prob}")
    require(max(seqlen_q, seqlen_k) <= 2**20, NAME, "more than 1M rows")
    require(options.softmax_layout in ("", "TND"), NAME, f"softmax_layout {options.softmax_layout!r}")
    require(packed or not options.softmax_layout, NAME, "softmax_layout TND only with input_layout TND")
    if packed:
        layouts.check_ends(options.ends_q, seqlen_q, NAME, "actual_seq_qlen")
        layouts.check_ends(options.ends_k, seqlen_k, NAME, "actual_seq_kvlen")
        assert options.ends_q is not None
        assert options.ends_k is not None
        require(len(options.ends_q) == len(options.ends_k) <= 1024, NAME, "actual_seq lists differ or exceed 1K")
        require(pse is None, NAME, "pse with TND is not simulated")
    if sink is not None:
        require(sink.dtype == torch.float32 and tuple(sink.shape) == (heads,), NAME, "sink is float32 [head_num]")
    _check_mask(query, key, pse, mask, options)


def _check_mask(query: Tensor, key: Tensor, pse: Tensor | None, mask: Tensor | None, options: Options) -> None:
    require(0 <= options.mode <= 4, NAME, f"sparse_mode {options.mode} is not simulated")
    batch, heads = query.shape[0], options.heads
    ends = tuple(layouts.lengths_of(tensor, options.layout)[0] for tensor in (query, key))
    if pse is not None:
        shapes = ((batch, heads, *ends), (batch, heads, 1, ends[1]), (1, heads, *ends))
        require(tuple(pse.shape) in shapes, NAME, f"pse of shape {tuple(pse.shape)}")
    if mask is not None and options.mode in (2, 3, 4):
        layouts.check_compressed(mask, NAME)
    elif mask is not None:
        require(options.layout != "TND", NAME, "a full mask with TND is not simulated")
        require(mask.dtype in (torch.bool, torch.uint8), NAME, f"atten_mask of dtype {mask.dtype}")
        full = ((batch, heads, *ends), (batch, 1, *ends), (1, 1, *ends), ends)
        require(tuple(mask.shape) in full, NAME, f"atten_mask of shape {tuple(mask.shape)}")
