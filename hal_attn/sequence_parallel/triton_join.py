"""The kernel of `fused.join`; importing it needs Triton, which comes with PyTorch for GPUs."""

# Triton compiles the source of this function, whose annotations it reads: they stay objects.
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def join_states(  # type: ignore[no-untyped-def]
    output,  # [T, H, D], joined in place
    lse,  # [H, T] float32, joined in place
    part,  # [T', H, D]
    part_lse,  # [H, T'] float32
    index,  # int64 [T'], the row of each part row, where `indexed`
    start,  # else the first row
    count,  # T'
    output_row,
    output_head,
    lse_head,
    part_row,
    part_head,
    part_lse_head,
    indexed: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,  # the power of two from `dim`
    block: tl.constexpr,
):
    """`block` rows of one head: weights from both LSEs, and the output where the part has any weight."""
    head = tl.program_id(1).to(tl.int64)
    of_part = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = of_part < count
    if indexed:  # noqa: SIM108 - Triton drops the branch of a constant, which it does for `if` in every release
        rows = tl.load(index + of_part, mask=there, other=0)
    else:
        rows = start + of_part
    before = tl.load(lse + head * lse_head + rows, mask=there, other=float("-inf"))
    new = tl.load(part_lse + head * part_lse_head + of_part, mask=there, other=float("-inf"))
    top = tl.maximum(before, new)
    # Where neither has a key, -inf less -inf would be NaN.
    top = tl.where(top == float("-inf"), 0.0, top)
    joined = top + tl.log(tl.exp(before - top) + tl.exp(new - top))
    share = tl.where(new == float("-inf"), 0.0, tl.exp(new - joined))
    columns = tl.arange(0, wide)[None, :]
    inside = there[:, None] & (columns < dim)
    places = output + rows[:, None] * output_row + head * output_head + columns
    own = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(part + of_part[:, None] * part_row + head * part_head + columns, mask=inside, other=0.0)
    weight = share[:, None]
    merged = own + weight * (other.to(tl.float32) - own)
    # Several warps load the same rows: one that stores before another has loaded would have its part joined twice.
    tl.debug_barrier()
    tl.store(lse + head * lse_head + rows, joined, mask=there)
    # A part without weight may hold anything.
    tl.store(places, tl.where(weight == 0.0, own, merged).to(output.dtype.element_ty), mask=inside)
