"""Who holds what: `shard`, `shard_kv`, `gather`, `positions`, without the engine and over real ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_attn import InvalidAttentionInputError
from hal_attn.sequence_parallel.spans import Span, divide_all, nest, tokens
from tests.sequence_parallel.case import Case, Degrees, groups, plan_of, plans
from tests.sequence_parallel.strategies import cases

LENGTHS = (9, 1, 0, 17, 3)
ENDS = {"prefix": (2, 0, 0, 3, 1), "suffix": (1, 1, 0, 2, 0), "key_prefix": (0, 3, 2, 1, 0)}
SHAPES = [
    Case(Degrees(ring=4), LENGTHS, **ENDS),
    Case(Degrees(ring=3), LENGTHS, layout="zigzag", **ENDS),
    Case(Degrees(kv_gather=2), LENGTHS, lengths_k=(4, 4, 2, 9, 1)),
    Case(Degrees(ulysses=4), LENGTHS, **ENDS),
    Case(Degrees(ulysses=2, ring=2), LENGTHS, layout="zigzag", **ENDS),
    Case(Degrees(ulysses=2, kv_gather=2), (13, 13), dense=True, prefix=2, suffix=1),
    Case(Degrees(ring=4), (3, 3), dense=True, key_prefix=2, layout="zigzag"),
]


def named(case):
    return f"{case.degrees}-{case.layout}-{'dense' if case.dense else 'packed'}"


def numbered(case, lengths):
    """A whole tensor that says of each token which sequence it is of and which place it has there."""
    marks = [torch.tensor([[n, place] for place in range(length)]).view(-1, 2) for n, length in enumerate(lengths)]
    return torch.cat(marks).view(*case.rows(lengths), 2) if marks else torch.zeros(0, 2, dtype=torch.int64)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_replicated_rows_are_on_every_rank_and_own_rows_on_one(world):
    @settings(max_examples=200)
    @given(cases(world))
    def check(case):
        sides = (
            ("shard", case.lengths, case.prefix),
            ("shard_kv", case.keys, tuple(map(sum, zip(case.key_prefix, case.prefix, strict=True)))),
        )
        for side, lengths, before in sides:
            held = [getattr(plan, side)(numbered(case, lengths)).reshape(-1, 2).tolist() for plan in plans(case)]
            for sequence, length in enumerate(lengths):
                everywhere = {*range(before[sequence]), *range(length - case.suffix[sequence], length)}
                for token in range(length):
                    ranks = sum([sequence, token] in rows for rows in held)
                    assert ranks == (world if token in everywhere else 1)
            assert all(rows == sorted(rows) for rows in held), "sequence after sequence, in the order of tokens"

    check()


@pytest.mark.parametrize("case", SHAPES, ids=named)
def test_own_tokens_are_shared_evenly(case):
    own = [plan.rows.own.numel() for plan in plans(case)]
    # One token of difference a sequence, in each of the two ways of sharing; more sequences even out.
    assert max(own) - min(own) <= 2 * len(case.lengths)


def test_contiguous_shares_as_documented():
    """7 tokens over 3 ranks as 3, 2, 2; the longer shares of the next sequence are other ranks'."""
    held = [plan.positions.tolist() for plan in plans(Case(Degrees(ring=3), (7,), layout="contiguous"))]
    assert held == [[0, 1, 2], [3, 4], [5, 6]]
    many = [plan.rows.count for plan in plans(Case(Degrees(ring=3), (1,) * 9))]
    assert many == [3, 3, 3]


def test_zigzag_shares_as_documented():
    held = [plan.positions.tolist() for plan in plans(Case(Degrees(ring=2), (8,), layout="zigzag"))]
    assert held == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([(4, 32), (4, 32)], [[(0, 2), (6, 8)], [(2, 6)]]),
        ([(4, 16), (4, 48)], [[(0, 4)], [(4, 8)]]),
        ([(4, 44), (4, 20)], [[(4, 8)], [(0, 4)]]),
        ([(2, 16), (4, 32), (2, 16)], [[(0, 1), (7, 8)], [(1, 3), (5, 7)], [(3, 5)]]),
        ([(8, 64), (0, 0)], None),
        ([(9, 64), (-1, 0)], None),
        ([(4, 100), (4, -36)], None),
        ([(0, 0), (8, 64)], [[], [(0, 8)]]),
    ],
)
def test_nest(shares, expected):
    found = nest(8, shares)
    assert (found and [list(map(tuple, spans)) for spans in found]) == expected


@settings(max_examples=300)
@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6), st.integers(1, 4))
def test_all_sequences_divided_as_one_run(counts, parts):
    """Spans with gaps between them; the parts follow one another, and differ by one token at most."""
    sequences = []
    for each in counts:
        ends = [sum(each[:index]) + 2 * index for index in range(len(each))]
        sequences.append(tuple(Span(start, start + count) for start, count in zip(ends, each, strict=True) if count))
    found = divide_all(sequences, parts)
    sizes = [sum(map(tokens, part)) for part in found]
    assert max(sizes) - min(sizes) <= 1

    def places(each):
        return [(index, place) for index, spans in enumerate(each) for span in spans for place in range(*span)]

    assert [token for part in found for token in places(part)] == places(sequences)


@pytest.mark.parametrize("case", SHAPES, ids=named)
def test_positions(case):
    for plan in plans(case):
        for side, lengths, positions in (
            (plan.shard, case.lengths, plan.positions),
            (plan.shard_kv, case.keys, plan.positions_kv),
        ):
            assert positions.dtype == torch.int64
            places = side(numbered(case, lengths))[..., 1]
            assert torch.equal(places, positions.expand(places.shape))


def there_and_back(case):
    plan = plan_of(case, groups(case.degrees))
    whole = [numbered(case, case.lengths), numbered(case, case.lengths) > 1, numbered(case, case.lengths).bfloat16()]
    return all(torch.equal(plan.gather(plan.shard(tensor)), tensor) for tensor in whole)


@pytest.mark.parametrize("case", SHAPES, ids=named)
def test_gather_is_the_inverse_of_shard(pool, case):
    assert pool(case.degrees.world).run(there_and_back, case) == [True] * case.degrees.world


def gathered_gradient(case):
    """The gradient of this rank's rows, for a loss on its whole tensor; and what it is to be."""
    plan = plan_of(case, groups(case.degrees))
    weight = numbered(case, case.lengths).double() + 10 * (1 + plan.groups.rank)
    local = plan.shard(torch.zeros_like(weight)).requires_grad_()
    (gradient,) = torch.autograd.grad((plan.gather(local) * weight).sum(), local)
    return torch.equal(gradient, plan.shard(weight))


@pytest.mark.parametrize("case", SHAPES, ids=named)
def test_the_gradient_of_gather(pool, case):
    assert pool(case.degrees.world).run(gathered_gradient, case) == [True] * case.degrees.world


@pytest.mark.parametrize(
    ("side", "shape"), [("shard", (29, 2)), ("shard_kv", (30, 2)), ("shard", (1, 30, 2))], ids=["query", "key", "dense"]
)
def test_a_tensor_that_is_not_whole(side, shape):
    plan = plans(Case(Degrees(ring=2), LENGTHS, **ENDS))[0]
    name = "key" if side == "shard_kv" else "query"
    with pytest.raises(InvalidAttentionInputError, match=f"{name}: got a whole tensor of shape .*; allowed: 3"):
        getattr(plan, side)(torch.zeros(shape))


def test_gather_of_other_rows():
    plan = plans(Case(Degrees(ring=2), (5,)))[1]
    with pytest.raises(InvalidAttentionInputError, match="local: got 3 rows; allowed: this rank's 2"):
        plan.gather(torch.zeros(3, 1))
