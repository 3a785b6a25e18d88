"""Whether candidates computed the same: each is held against the others, since nobody here knows the truth."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hal_attn.tuning.shape import matmul_precision

# Beyond this many values, evenly spread rows of a result are looked at.
MOST_VALUES = 1 << 22
# In units of the dtype's eps, of the root mean square and of the largest value. 16-bit kernels round their weights and
# their output; longer ones sum in other orders, and a score of 50 makes 50 units of one.
HALF, FULL = (8.0, 32.0), (64.0, 512.0)

Result = Mapping[str, Tensor]


def some_rows(tensor: Tensor) -> Tensor:
    """A copy of `tensor`, or of rows of it spread evenly, the first and the last among them."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    if rows.numel() <= MOST_VALUES:
        return rows.clone()
    count = max(2, MOST_VALUES // rows.shape[1])
    where = torch.arange(count, device=rows.device) * (rows.shape[0] - 1) // (count - 1)
    return rows.index_select(0, where)


def odd_ones(results: Mapping[str, Result], dtype: torch.dtype) -> dict[str, str]:
    """Those whose result differs from that of most, and how.

    Most are the largest set that agrees with one of its members. Of equally large ones it is the one around the last
    name: a platform tries its plainest backend last.
    """
    names = list(results)
    alike = {one: {other for other in names if not difference(results[other], results[one], dtype)} for one in names}
    centre = max(reversed(names), key=lambda name: len(alike[name]), default="")
    return {
        name: f"its result differs from that of {', '.join(sorted(alike[centre]))}: "
        + difference(results[name], results[centre], dtype)
        for name in names
        if name not in alike[centre]
    }


def difference(have: Result, other: Result, dtype: torch.dtype) -> str:
    """What is too far apart; "" where nothing is.

    Each part by its own size, but gradients by the largest of them, since one that should be 0 is nothing but rounding,
    and the LSE by 1 at least.
    """
    shortened = dtype == torch.float32 and matmul_precision() != "highest"
    eps = torch.finfo(torch.float16).eps if shortened else torch.finfo(dtype).eps
    mean, most = (eps * limit for limit in (HALF if dtype.itemsize < 4 else FULL))
    sizes = {part: _sizes(tensor) for part, tensor in other.items()}
    gradients = [size for part, size in sizes.items() if part.startswith("gradient")]
    for part, tensor in have.items():
        if tensor.shape != other[part].shape:
            return f"{part} of shape {tuple(tensor.shape)}, not {tuple(other[part].shape)}"
        apart = _apart(tensor, other[part])
        if apart is None:
            return f"{part} is not finite in the same places"
        floor = 1.0 if part == "LSE" else 0.0
        scales = gradients if part.startswith("gradient") else [sizes[part]]
        for index, limit in enumerate((mean, most)):
            allowed = limit * max(floor, *(scale[index] for scale in scales))
            if apart[index] > allowed:
                return f"{part} is {apart[index]:.2g} apart, {allowed:.2g} is allowed"
    return ""


def _apart(have: Tensor, other: Tensor) -> tuple[float, float] | None:
    """Root mean square and largest of the difference; None where one is not finite and the other is another value."""
    have, other = _wide(have), _wide(other)
    same = (have == other) | (have.isnan() & other.isnan())
    apart = torch.where(same, 0.0, have - other)
    return _sizes(apart) if bool(apart.isfinite().all()) else None


def _sizes(tensor: Tensor) -> tuple[float, float]:
    """Root mean square and largest of the finite values."""
    if not tensor.numel():
        return 0.0, 0.0
    known = torch.where(tensor.isfinite(), _wide(tensor), 0.0)
    return float(known.square().mean().sqrt()), float(known.abs().max())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
