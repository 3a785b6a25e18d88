"""One attention over some ranks: described once, run by every rank, judged against one process's float64 oracle."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hal_attn import PackedSequences, reference_attention, reference_varlen_attention
from hal_attn.sequence_parallel import Plan, SequenceParallelGroups
from tests.support import randn

# Of the largest value of a tensor, or of 1.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-5}
GRADIENTS = ("query", "key", "value", "sinks")


@dataclass(frozen=True)
class Degrees:
    """How many ranks exchange heads, and how many exchange keys."""

    ulysses: int = 1
    ring: int = 1
    kv_gather: int = 1

    def __str__(self) -> str:
        named = [f"{name}{degree}" for name, degree in vars(self).items() if degree > 1]
        return "_".join(named) or "local"

    @property
    def world(self) -> int:
        return self.ulysses * self.ring * self.kv_gather


@dataclass(frozen=True)
class Case:
    """Sequences, options and tensors; `lengths` and `lengths_k` count everything replicated.

    Attributes:
        dense: `[B, S, H, D]` tensors; all lengths are then alike.
        mask: "bool" or "float", and which of its dimensions are not 1; padding: whether there is a key_padding_mask.
        lse_weight: whether the loss depends on the LSE.
    """

    degrees: Degrees
    lengths: tuple[int, ...]
    lengths_k: tuple[int, ...] | None = None
    dense: bool = False
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_head_dim: int = 8
    dtype: torch.dtype = torch.float32
    causal: bool = False
    window_size: tuple[int | None, int | None] | None = None
    layout: str = "auto"
    prefix: int | tuple[int, ...] = 0
    suffix: int | tuple[int, ...] = 0
    key_prefix: int | tuple[int, ...] = 0
    mask: tuple[str, tuple[bool, bool, bool, bool]] | None = None
    padding: bool = False
    masks: str = "whole"
    sinks: bool = False
    softcap: float = 0.0
    scale: float | None = None
    lse_weight: bool = False
    backend: str | None = None
    seed: int = 0

    def but(self, **changes) -> Case:
        return replace(self, **changes)

    @property
    def keys(self) -> tuple[int, ...]:
        """Key lengths."""
        if self.lengths_k is not None:
            return self.lengths_k
        first = self.key_prefix if isinstance(self.key_prefix, tuple) else (self.key_prefix,) * len(self.lengths)
        return tuple(length + more for length, more in zip(self.lengths, first, strict=True))

    @property
    def options(self) -> dict:
        """Of the oracle and of `plan.attention`."""
        return {"scale": self.scale, "softcap": self.softcap}

    @property
    def band(self) -> dict:
        """Of the oracle and of the plan."""
        return {"causal": self.causal, "window_size": self.window_size}

    def rows(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """The leading dimensions of a tensor over these lengths."""
        return (len(lengths), lengths[0]) if self.dense else (sum(lengths),)


def tensors(case: Case) -> dict[str, Tensor]:
    """Whole query, key, value and sinks, and the weights of the loss; the same on every rank."""
    queries, keys, heads = case.rows(case.lengths), case.rows(case.keys), case.heads
    made = {
        "query": randn(*queries, heads, case.head_dim, seed=10 * case.seed, dtype=case.dtype),
        "key": randn(*keys, case.kv_heads, case.head_dim, seed=10 * case.seed + 1, dtype=case.dtype),
        "value": randn(*keys, case.kv_heads, case.value_head_dim, seed=10 * case.seed + 2, dtype=case.dtype),
        "weight": randn(*queries, heads, case.value_head_dim, seed=10 * case.seed + 3, dtype=case.dtype),
    }
    if case.sinks:
        made["sinks"] = randn(heads, seed=10 * case.seed + 4)
    if case.lse_weight:
        made["lse_weight"] = randn(*queries, heads, seed=10 * case.seed + 5)
    return made


def masks(case: Case) -> dict[str, Tensor]:
    """Whole masks; about a third is hidden, -inf in a float mask."""
    made = {}
    if case.mask is not None:
        kind, kept = case.mask
        full = (len(case.lengths), case.heads, case.lengths[0], case.keys[0])
        shape = [size if keep else 1 for size, keep in zip(full, kept, strict=True)]
        visible = randn(*shape, seed=10 * case.seed + 6) < 0.4
        bias = randn(*shape, seed=10 * case.seed + 7, dtype=case.dtype)
        made["mask"] = visible if kind == "bool" else bias.masked_fill(~visible, -torch.inf)
    if case.padding:
        made["key_padding_mask"] = randn(len(case.lengths), case.keys[0], seed=10 * case.seed + 8) < 0.5
    return made


# On a rank


@functools.cache
def groups(degrees: Degrees) -> SequenceParallelGroups:
    """The groups of a pool's rank, made once."""
    return SequenceParallelGroups.create(degrees.ulysses, degrees.ring, degrees.kv_gather)


def plan_of(case: Case, of: SequenceParallelGroups) -> Plan:
    """The plan of a case."""
    options = {
        "layout": case.layout,
        "replicated_prefix": case.prefix,
        "replicated_suffix": case.suffix,
        "key_prefix": case.key_prefix,
        "masks": case.masks,
        **case.band,
    }
    if case.dense:
        return of.plan(batch=len(case.lengths), seqlen=case.lengths[0], seqlen_k=case.keys[0], **options)
    return of.plan(case.lengths, case.lengths_k, **options)


def shard_lse(plan: Plan, lse: Tensor) -> Tensor:
    """This rank's part of a whole LSE, `[H, T]` or `[B, H, S]`."""
    return plan.shard(lse.transpose(-1, -2).contiguous()).transpose(-1, -2)


def shard_masks(case: Case, plan: Plan) -> dict[str, Tensor]:
    """The masks as the plan wants them."""
    made = masks(case)
    if case.masks == "sharded":
        if "mask" in made and made["mask"].shape[2] > 1:
            made["mask"] = made["mask"][:, :, plan.positions]
        if "key_padding_mask" in made:
            made["key_padding_mask"] = made["key_padding_mask"][:, plan.positions_kv]
    return made


def answer(case: Case, of: SequenceParallelGroups | None = None) -> dict[str, Tensor]:
    """This rank's output, LSE, and gradients of a weighted sum of both; by the groups of the whole pool, or others."""
    plan = plan_of(case, groups(case.degrees) if of is None else of)
    whole = tensors(case)
    leaves = {
        "query": plan.shard(whole["query"]).clone().requires_grad_(),
        "key": plan.shard_kv(whole["key"]).clone().requires_grad_(),
        "value": plan.shard_kv(whole["value"]).clone().requires_grad_(),
    }
    sinks = whole["sinks"].clone().requires_grad_() if case.sinks else None
    output, lse = plan.attention(
        *leaves.values(), sinks=sinks, return_lse=True, backend=case.backend, **case.options, **shard_masks(case, plan)
    )
    assert output.dtype == case.dtype
    assert lse.dtype == torch.float32
    loss = (output * plan.shard(whole["weight"])).double().sum()
    if case.lse_weight:
        weight = shard_lse(plan, whole["lse_weight"].transpose(-1, -2))
        loss = loss + (lse.masked_fill(lse.isinf(), 0.0) * weight).double().sum()
    wanted = leaves | ({} if sinks is None else {"sinks": sinks})
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    found = {"output": output.detach(), "lse": lse.detach()}
    return found | dict(zip(wanted, gradients, strict=True))


# In the process of the test


@dataclass
class Errors:
    """The largest errors so far, each of the largest value or of 1: outputs, LSEs, gradients."""

    output: float = 0.0
    lse: float = 0.0
    gradient: float = 0.0

    def add(self, other: Errors) -> None:
        for name, value in vars(other).items():
            setattr(self, name, max(getattr(self, name), value))


def right_answer(case: Case) -> dict[str, Tensor]:
    """What `answer` gives in one process, whole, in float64."""
    whole, given = tensors(case), masks(case)
    leaves = {name: whole[name].double().requires_grad_() for name in GRADIENTS if name in whole}
    inputs = [leaves[name] for name in ("query", "key", "value")]
    options = {"sinks": leaves.get("sinks"), **case.options, **case.band}
    if case.dense:
        output, lse = reference_attention(*inputs, **options, **given)
    else:
        packing = PackedSequences.from_lengths(case.lengths, case.keys)
        output, lse = reference_varlen_attention(*inputs, packing, **options)
    loss = (output * whole["weight"].double()).sum()
    if case.lse_weight:
        loss = loss + (lse.masked_fill(lse.isinf(), 0.0) * whole["lse_weight"].transpose(-1, -2).double()).sum()
    found = {"output": output.detach(), "lse": lse.detach()}
    if not loss.requires_grad:
        return found | {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return found | dict(zip(leaves, gradients, strict=True))


def place(degrees: Degrees, rank: int) -> SequenceParallelGroups:
    """Where a rank stands, without process groups: enough for plans that say who holds what."""
    exchange_rank, ulysses_rank = divmod(rank, degrees.ulysses)
    return SequenceParallelGroups(
        degrees.ulysses, degrees.ring, degrees.kv_gather, exchange_rank, ulysses_rank, ranks=tuple(range(degrees.world))
    )


def plans(case: Case) -> list[Plan]:
    """By rank, the plan of a case, without process groups."""
    return [plan_of(case, place(case.degrees, rank)) for rank in range(case.degrees.world)]


def judge(case: Case, found: list[dict[str, Tensor]]) -> Errors:
    """The largest errors of all ranks' answers; AssertionError where one is too large."""
    right = right_answer(case)
    errors = Errors()
    for rank, (plan, answers) in enumerate(zip(plans(case), found, strict=True)):
        parts = {"output": plan.shard(right["output"]), "lse": shard_lse(plan, right["lse"])}
        parts["query"] = plan.shard(right["query"])
        parts |= {name: plan.shard_kv(right[name]) for name in ("key", "value")}
        if case.sinks:
            parts["sinks"] = right["sinks"]
        assert answers.keys() == parts.keys()
        for name, exact in parts.items():
            error = _error(answers[name], exact, right[name], f"{name} on rank {rank}")
            kind = "gradient" if name in GRADIENTS else name
            assert error <= TOLERANCE[case.dtype], f"{name} on rank {rank}: error {error:.3g} in {case}"
            errors.add(Errors(**{kind: error}))
    return errors


def _error(found: Tensor, exact: Tensor, whole: Tensor, what: str) -> float:
    """The largest error, of the largest value of the whole tensor or of 1."""
    assert found.shape == exact.shape, f"{what}: shape {tuple(found.shape)}, right is {tuple(exact.shape)}"
    hidden = exact.isneginf()
    assert torch.equal(found.isneginf(), hidden), f"{what}: -inf in other places"
    difference = (found.double() - exact).masked_fill(hidden, 0.0)
    assert difference.isfinite().all(), f"{what}: not finite"
    if not difference.numel():
        return 0.0
    largest = whole.masked_fill(whole.isneginf(), 0.0).abs().max().item()
    return difference.abs().max().item() / max(1.0, largest)


def assert_right(pool, case: Case, environ=None) -> Errors:
    """The case over a pool of its ranks is right."""
    return judge(case, pool(case.degrees.world).run(answer, case, environ=environ))
