"""What really travels, by destination: only what is seen there, once."""

from tests.sequence_parallel.case import Case, Degrees, groups, plan_of, tensors
from tests.sequence_parallel.watching import watching

FLOAT32 = 4


def sent(case, return_lse=False):
    """By operation of one forward pass, by destination: the bytes that this rank sends."""
    plan = plan_of(case, groups(case.degrees))
    whole = tensors(case)
    local = plan.shard(whole["query"]), plan.shard_kv(whole["key"]), plan.shard_kv(whole["value"])
    with watching() as log:
        plan.attention(*local, return_lse=return_lse)
    return log.sent


def keys(case, rows):
    """Bytes of so many rows of K and V."""
    return rows * case.kv_heads * (case.head_dim + case.value_head_dim) * FLOAT32


def test_a_ring_sends_each_buffer_on_at_every_hop(pool):
    case = Case(Degrees(ring=4), (32,))
    assert pool(4).run(sent, case) == [[{(rank + 1) % 4: keys(case, 8)}] * 3 for rank in range(4)]


def test_hops_that_no_query_needs_do_not_travel(pool):
    behind = Case(Degrees(ring=4), (32,), causal=True, window_size=(8, 0), layout="contiguous")
    assert pool(4).run(sent, behind) == [[{rank + 1: keys(behind, 8)} if rank < 3 else {}] for rank in range(4)]
    ahead = behind.but(causal=False, window_size=(0, 8))
    assert pool(4).run(sent, ahead) == [[{rank - 1: keys(ahead, 8)} if rank > 0 else {}] for rank in range(4)]
    nothing = behind.but(window_size=(0, 0))
    assert pool(4).run(sent, nothing) == [[]] * 4


def test_keys_that_nobody_else_sees_do_not_travel(pool):
    """Of zigzag chunks 0 to 3, rank 1 sees chunk 0 of rank 0 and not chunk 3; rank 0 sees both of rank 1's."""
    case = Case(Degrees(ring=2), (32,), causal=True)
    assert pool(2).run(sent, case) == [[{1: keys(case, 8)}], [{0: keys(case, 16)}]]


def test_replicated_keys_do_not_travel(pool):
    case = Case(Degrees(ring=2), (21,), prefix=3, suffix=2, key_prefix=4)
    assert pool(2).run(sent, case) == [[{1: keys(case, 8)}], [{0: keys(case, 8)}]]


def test_a_rank_without_keys_sends_none(pool):
    case = Case(Degrees(ring=3), (9,), lengths_k=(2,), layout="contiguous")
    own = [1, 1, 0]
    expected = [
        [{(rank + 1) % 3: keys(case, own[(rank - hop) % 3])} if own[(rank - hop) % 3] else {} for hop in (0, 1)]
        for rank in range(3)
    ]
    assert pool(3).run(sent, case) == expected


def test_a_gather_sends_each_rank_what_its_queries_see(pool):
    causal = Case(Degrees(kv_gather=4), (32,), causal=True, layout="contiguous")
    assert pool(4).run(sent, causal) == [[{to: keys(causal, 8) for to in range(rank + 1, 4)}] for rank in range(4)]
    window = causal.but(window_size=(3, 0))
    expected = [[{rank + 1: keys(window, 3)} if rank < 3 else {}] for rank in range(4)]
    assert pool(4).run(sent, window) == expected
    apart = causal.but(lengths=(8, 8), layout="contiguous")
    assert pool(4).run(sent, apart) == [[{to: 2 * keys(apart, 2) for to in range(rank + 1, 4)}] for rank in range(4)]


def test_a_key_head_goes_only_where_a_query_head_reads_it(pool):
    """6 query heads over 2 key heads, 4 ranks: each key head goes to two ranks, and no rank gets both."""
    case = Case(Degrees(ulysses=4), (16,), heads=6, kv_heads=2)
    queries, rows, numbers = [1, 2, 1, 2], 4, FLOAT32 * case.head_dim
    there = [{to: rows * numbers * (queries[to] + 2) for to in range(4) if to != rank} for rank in range(4)]
    back = [{to: rows * numbers * queries[rank] for to in range(4) if to != rank} for rank in range(4)]
    assert pool(4).run(sent, case) == [[there[rank], back[rank]] for rank in range(4)]
    lse = [-(-rows * count * FLOAT32 // 16) * 16 for count in queries]
    back = [{to: size + lse[rank] for to, size in back[rank].items()} for rank in range(4)]
    assert pool(4).run(sent, case, True) == [[there[rank], back[rank]] for rank in range(4)]


def test_replicated_tokens_are_not_sent_to_where_they_are(pool):
    """Heads of replicated tokens are taken where they are needed; only their output has to come back."""
    case = Case(Degrees(ulysses=2), (12,), heads=2, kv_heads=2, prefix=4)
    found = pool(2).run(sent, case)
    row = FLOAT32 * case.head_dim
    assert [each[0] for each in found] == [{1: 4 * 3 * row}, {0: 4 * 3 * row}]
    assert [each[1] for each in found] == [{1: (4 + 4) * row}, {0: (4 + 4) * row}]
