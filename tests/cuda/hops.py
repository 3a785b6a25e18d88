"""Problems whose keys are cut into hops, and the gradients of all hops, each from output and LSE of the whole, added up
and held to the float64 oracle."""

from dataclasses import dataclass, field

import torch

from hal_attn import PackedSequences, explain
from tests.support import assert_close_to_oracle, dense, expected


@dataclass(frozen=True)
class Hops:
    """`count` sequences alike. `cuts`: the rows of each sequence's queries and of its keys, and whether the hop is a
    triangle; together every pair that the whole leaves visible, once."""

    count: int
    seqlen_q: int
    seqlen_k: int
    cuts: tuple[tuple[slice, slice, bool], ...]
    causal: bool = False
    shape: dict = field(default_factory=dict)


def triangle(count, length, **shape):
    first, second = slice(0, length // 2), slice(length // 2, length)
    cuts = ((first, first, True), (second, first, False), (second, second, True))
    return Hops(count, length, length, cuts, causal=True, shape=shape)


def rectangle(count, seqlen_q, seqlen_k, at, **shape):
    cuts = tuple((slice(0, seqlen_q), keys, False) for keys in (slice(0, at), slice(at, seqlen_k)))
    return Hops(count, seqlen_q, seqlen_k, cuts, shape=shape)


HOPS = {
    "full": rectangle(1, 200, 400, 200, head_dim=128),
    "more keys, and fewer": rectangle(1, 200, 437, 333, head_dim=128),
    "causal": triangle(1, 400, head_dim=128),
    "several": rectangle(3, 96, 160, 96, head_dim=64),
    "several, causal": triangle(3, 192, head_dim=64),
    "grouped heads": triangle(2, 192, head_dim=128, kv_heads=2),
    "head dim 72 and 40": triangle(1, 128, head_dim=72, value_head_dim=40),
}


def gradients_of_hops(hops, backend, device, dtype=torch.bfloat16):
    """Holds the sums of `backend`'s gradients to the precision rule."""
    tensors = dense(hops.count, hops.seqlen_q, hops.seqlen_k, dtype=dtype, **hops.shape)
    answer = expected(*tensors, causal=hops.causal)
    query, key, value, output, weight = (
        tensor.to(device, dtype) for tensor in (*tensors, answer.output, answer.weight)
    )
    lse = answer.lse.to(device, torch.float32)
    sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in (query, key, value)]
    for rows, keys, causal in hops.cuts:
        lengths, lengths_k = ([part.stop - part.start] * hops.count for part in (rows, keys))
        found = backend.backward_varlen(
            *(
                tensor[:, part].flatten(0, 1)
                for tensor, part in zip(
                    (weight, query, key, value, output), (rows, rows, keys, keys, rows), strict=True
                )
            ),
            lse[:, :, rows].transpose(0, 1).flatten(1),
            sequences=PackedSequences.from_lengths(lengths, lengths_k),
            scale=query.shape[-1] ** -0.5,
            causal=causal,
            window_size=None,
            deterministic=False,
        )
        assert found is not None, f"{backend.name} declined"
        for total, part, gradient in zip(sums, (rows, keys, keys), found, strict=True):
            total[:, part] += gradient.unflatten(0, (hops.count, -1))
    for which, have, exact, plain in zip("qkv", sums, answer.gradients, answer.plain_gradients, strict=True):
        what = f"{backend.name}: {which}"
        assert_close_to_oracle(have.cpu().to(dtype), exact, plain, what, largest_gradient=answer.largest_gradient)


def backend_named(name, device):
    """As the platform of that device has it."""
    tensors = [tensor.to(device) for tensor in dense(1, 2, heads=1, head_dim=8, dtype=torch.bfloat16)]
    return next(each.backend for each in explain(*tensors).considered if each.backend.name == name)
