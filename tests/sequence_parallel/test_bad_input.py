"""What has no meaning is refused by its name, on all ranks alike."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hal_attn import InvalidAttentionInputError
from hal_attn.sequence_parallel import SequenceParallelGroups
from tests.sequence_parallel.case import Case, Degrees, answer, groups, judge, place, plan_of, tensors

LENGTHS = (9, 4)


def create(options):
    SequenceParallelGroups.create(**options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ring": 3}, "ulysses, ring, kv_gather: got ring=3, kv_gather=1, ulysses=1, together 3 ranks; allowed: .* 2"),
        ({"ulysses": 2, "ring": 2}, "ring=2, kv_gather=1, ulysses=2, together 4 ranks"),
        ({}, "together 1 ranks"),
        ({"ring": 2, "kv_gather": 2}, "ring, kv_gather: got ring=2 and kv_gather=2; allowed: one of them above 1"),
        ({"ring": 0}, "ring: got 0; allowed: a whole number of at least 1"),
        ({"kv_gather": -2}, "kv_gather: got -2"),
        ({"ulysses": 2.0}, "ulysses: got 2.0"),
        ({"ulysses": True, "ring": 2}, "ulysses: got True"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()) or "none",
)
def test_degrees(pool, options, told):
    for error in pool(2).errors(create, options):
        with pytest.raises(InvalidAttentionInputError, match=told):
            raise error


def test_degrees_without_processes():
    with pytest.raises(InvalidAttentionInputError, match=r"process_group: got no process group.*2 ranks.*torchrun"):
        SequenceParallelGroups.create(ring=2)
    assert SequenceParallelGroups.create().size == 1


def create_of_mesh(shape, names, options):
    SequenceParallelGroups.create(mesh=init_device_mesh("cpu", shape, mesh_dim_names=names), **options)


@pytest.mark.parametrize(
    ("shape", "names", "options", "told"),
    [
        (
            (2, 2),
            ("dp", "ring"),
            {},
            r"mesh: got dimensions \('dp', 'ring'\); allowed: dimensions named ring, kv_gather",
        ),
        ((2, 2), None, {}, "mesh: got dimensions without names"),
        ((2, 2), ("ring", "kv_gather"), {}, "ring, kv_gather: got ring=2 and kv_gather=2"),
        ((2, 2), ("ulysses", "ring"), {"ulysses": 4}, "ulysses: got 4; allowed: the size of the mesh's dimension, 2"),
        ((4,), ("ring",), {"ulysses": 2}, "ulysses: got 2; allowed: the size of the mesh's dimension, 1"),
    ],
    ids=["name", "no names", "both", "degree", "degree of a missing dimension"],
)
def test_a_mesh(pool, shape, names, options, told):
    for error in pool(4).errors(create_of_mesh, shape, names, options):
        with pytest.raises(InvalidAttentionInputError, match=told):
            raise error


def create_of_ranks(ranks, names):
    SequenceParallelGroups.create(mesh=DeviceMesh("cpu", ranks, mesh_dim_names=names))


@pytest.mark.parametrize(
    ("ranks", "names", "told"),
    [
        ([3, 2, 1, 0], ("ring",), r"mesh: got ranks \[3, 2, 1, 0\], which do not rise along ring"),
        ([[1, 0], [3, 2]], ("ring", "ulysses"), "which do not rise along ulysses; allowed: ranks that rise"),
        ([[2, 3], [0, 1]], ("kv_gather", "ulysses"), "which do not rise along kv_gather"),
    ],
    ids=["ring", "ulysses", "kv_gather"],
)
def test_a_mesh_whose_ranks_fall_is_refused(pool, ranks, names, told):
    """Collectives count by the rank in a group, which is in rising order: keys would go to others than are meant."""
    for error in pool(4).errors(create_of_ranks, ranks, names):
        with pytest.raises(InvalidAttentionInputError, match=told):
            raise error


def answer_over_mesh(case, shape, names, choose):
    """By the groups of a mesh, or of one dimension of it: this rank's place among them, and its answer."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    of = SequenceParallelGroups.create(mesh=mesh if choose is None else mesh[choose])
    return of.rank, answer(case, of)


@pytest.mark.parametrize("order", [("ring", "ulysses"), ("ulysses", "ring")], ids="-".join)
@pytest.mark.parametrize("exchange", ["ring", "kv_gather"])
def test_a_mesh_in_either_order(pool, order, exchange):
    names = tuple(exchange if name == "ring" else name for name in order)
    case = Case(Degrees(**{"ulysses": 2, exchange: 2}), LENGTHS, causal=True, prefix=1)
    found = pool(4).run(answer_over_mesh, case, (2, 2), names, None)
    # Neighbours exchange heads where ulysses is the inner dimension; the outer one puts them two apart.
    places = [0, 1, 2, 3] if names[1] == "ulysses" else [0, 2, 1, 3]
    assert [rank for rank, _ in found] == places
    judge(case, [answers for _, answers in sorted(found, key=lambda each: each[0])])


def test_one_dimension_of_a_mesh(pool):
    """Data parallel ranks apart: two groups of two, each with the whole case."""
    case = Case(Degrees(ring=2), LENGTHS, causal=True)
    found = pool(4).run(answer_over_mesh, case, (2, 2), ("dp", "ring"), "ring")
    for group in (found[:2], found[2:]):
        judge(case, [answers for _, answers in group])


def answer_in_group(case):
    """Among ranks 1 and 2; nothing on rank 0."""
    two = dist.new_group([1, 2])
    return None if dist.get_rank() == 0 else answer(case, SequenceParallelGroups.create(ring=2, process_group=two))


def test_a_process_group_of_some_ranks(pool):
    case = Case(Degrees(ring=2), LENGTHS, causal=True, prefix=1)
    nothing, *found = pool(3).run(answer_in_group, case)
    assert nothing is None
    judge(case, found)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lengths": [3, 4.0]}, "lengths: got 4.0; allowed: whole numbers of at least 0"),
        ({"lengths": [3, -1]}, "lengths: got -1"),
        ({"lengths": [3, 4], "lengths_k": [3]}, "lengths_k: got 1 sequences; allowed: as many as lengths has, 2"),
        ({"lengths": [3], "batch": 1, "seqlen": 3}, "lengths: got .*; allowed: lengths, or batch and seqlen"),
        ({"batch": 2}, "lengths: got .*; allowed: lengths, or batch and seqlen"),
        ({"batch": 2, "seqlen": -1}, "seqlen: got -1"),
        ({"batch": 2.5, "seqlen": 1}, "batch: got 2.5"),
        ({"lengths": [3], "window_size": 3}, "window_size: got 3; allowed: a pair"),
        ({"lengths": [3], "window_size": (1, -2)}, "window_size: got .*; allowed: whole numbers of at least -1"),
        ({"lengths": [3], "layout": "striped"}, "layout: got 'striped'; allowed: 'auto', 'contiguous' or 'zigzag'"),
        ({"lengths": [3], "masks": "mine"}, "masks: got 'mine'; allowed: 'whole' or 'sharded'"),
        ({"lengths": [3, 9], "replicated_prefix": 4}, "replicated_prefix: got 4 .* at most the 3 of sequence 0"),
        (
            {"lengths": [9], "replicated_suffix": [1, 2]},
            "replicated_suffix: got 2 numbers; allowed: one, or one for each",
        ),
        ({"lengths": [9], "lengths_k": [2], "key_prefix": 3}, "key_prefix: got 3 .* at most the 2 keys of sequence 0"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_a_wrong_plan(options, told):
    with pytest.raises(InvalidAttentionInputError, match=told):
        place(Degrees(ring=2), 0).plan(**options)


def one_rank(case, change, **options):
    """A call on one rank with some of its arguments changed."""
    plan = plan_of(case, SequenceParallelGroups.create())
    given = {name: tensor for name, tensor in tensors(case).items() if name in ("query", "key", "value")}
    return plan.attention(**{**given, **change(given)}, **options)


PACKED = Case(Degrees(), LENGTHS)
DENSE = Case(Degrees(), (9, 9), dense=True)


@pytest.mark.parametrize(
    ("case", "change", "told"),
    [
        (PACKED, lambda t: {"query": t["query"][:-1]}, "query: got shape .* 12 rows, on rank 0; allowed: the 13 rows"),
        (PACKED, lambda t: {"key": t["key"][1:]}, "key: got shape .* 12 rows.*plan.shard_kv"),
        (PACKED, lambda t: {"value": t["value"][1:]}, "value: got shape .* 12 rows"),
        (PACKED, lambda t: {"query": t["query"][None]}, r"query: got shape \(1, 13, 4, 8\); allowed: \[T, H, D\]"),
        (
            DENSE,
            lambda t: {"query": t["query"].flatten(0, 1)},
            r"query: got shape \(18, 4, 8\); allowed: \[B, S, H, D\]",
        ),
        (DENSE, lambda t: {"query": t["query"].view(3, 6, 4, 8)}, "query: got shape .*; allowed: .* in a batch of 2"),
        (PACKED, lambda t: {"key": t["key"][..., :4]}, "key: got head dim 4"),
        (PACKED, lambda t: {"query": t["query"][:, :3]}, "key: got 2 heads"),
        (PACKED, lambda t: {"value": t["value"][:, :1]}, "value: got 1 heads"),
        (PACKED, lambda t: {"value": t["value"].double()}, "value: got dtype torch.float64"),
        (PACKED, lambda t: {"key": t["key"].to("meta")}, "key: got device meta"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_a_wrong_shard(case, change, told):
    with pytest.raises(InvalidAttentionInputError, match=told):
        one_rank(case, change)


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        ({"num_heads": 8}, "num_heads: got 4; allowed: what the plan was made for, 8"),
        ({"num_kv_heads": 4}, "num_kv_heads: got 2"),
        ({"head_dim": 16}, "head_dim: got 8"),
        ({"value_head_dim": 16}, "value_head_dim: got 8"),
        ({"dtype": torch.bfloat16}, "dtype: got torch.float32"),
        ({"device": "cuda"}, "device: got cpu"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_tensors_that_the_plan_was_not_made_for(expected, told):
    plan = SequenceParallelGroups.create().plan(LENGTHS, **expected)
    whole = tensors(PACKED)
    with pytest.raises(InvalidAttentionInputError, match=told):
        plan.attention(whole["query"], whole["key"], whole["value"])


@pytest.mark.parametrize(
    ("case", "masks", "told"),
    [
        (PACKED, {"mask": torch.ones(1, 1, 13, 13)}, "mask: got given; allowed: none: this plan is packed"),
        (
            PACKED,
            {"key_padding_mask": torch.ones(2, 9, dtype=torch.bool)},
            "key_padding_mask: got given; allowed: none",
        ),
        (DENSE, {"mask": torch.ones(9, 9)}, "mask: got 2 dimensions; allowed: four.*key_padding_mask"),
        (DENSE, {"mask": torch.ones(1, 1, 9, 8)}, r"mask: got shape \(1, 1, 9, 8\).*takes masks whole"),
        (DENSE, {"mask": torch.ones(1, 2, 9, 9)}, r"mask: got shape \(1, 2, 9, 9\)"),
        (DENSE, {"mask": torch.ones(1, 1, 9, 9, dtype=torch.int64)}, "mask: got dtype torch.int64; allowed: bool"),
        (DENSE, {"mask": torch.ones(1, 1, 9, 9, requires_grad=True)}, "mask: got a mask that wants a gradient"),
        (DENSE, {"mask": [[1]]}, "mask: got a list"),
        (
            DENSE,
            {"key_padding_mask": torch.ones(2, 8, dtype=torch.bool)},
            r"key_padding_mask: got .*\(2, 8\).*\(2, 9\)",
        ),
        (DENSE, {"key_padding_mask": torch.ones(2, 9)}, "key_padding_mask: got torch.float32"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_a_wrong_mask(case, masks, told):
    with pytest.raises(InvalidAttentionInputError, match=told):
        one_rank(case, lambda _: {}, **masks)


def attend_with_whole_masks(case, masks):
    plan, whole = plan_of(case, groups(case.degrees)), tensors(case)
    local = plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])
    plan.attention(*local, **masks)


@pytest.mark.parametrize("name", ["mask", "key_padding_mask"])
def test_a_whole_mask_where_shards_are_due(pool, name):
    mask = torch.ones((2, 9) if name == "key_padding_mask" else (1, 1, 9, 9), dtype=torch.bool)
    case = Case(Degrees(ring=2), (9, 9), dense=True, masks="sharded")
    for error in pool(2).errors(attend_with_whole_masks, case, {name: mask}):
        with pytest.raises(InvalidAttentionInputError, match=f"{name}: got .*this plan takes masks sharded"):
            raise error


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"softcap": -1.0}, "softcap: got -1.0"),
        ({"softcap": "high"}, "softcap: got"),
        ({"scale": float("nan")}, "scale: got nan"),
        ({"sinks": torch.zeros(3)}, r"sinks: got shape \(3,\)"),
        ({"sinks": 1.0}, "sinks: got a float"),
        ({"deterministic": 1}, "deterministic: got 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items())[:20],
)
@pytest.mark.parametrize("lengths", [LENGTHS, (0, 0)], ids=["tokens", "no tokens"])
def test_a_wrong_option(lengths, options, told):
    with pytest.raises(InvalidAttentionInputError, match=told):
        one_rank(PACKED.but(lengths=lengths), lambda _: {}, **options)
