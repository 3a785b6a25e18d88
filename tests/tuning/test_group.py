"""One choice for all ranks, on real gloo processes: whoever measures, whatever the order of calls, whoever is missing.

Times are made up by rank, in milliseconds of `cpu_flash`, `cpu_sdpa` and `cpu_math`; a test that would wait for a rank
that never calls ends with the pool's time limit.
"""

import json
import os
from unittest import mock

import pytest
import torch

from hal_attn import attention, explain, memo, varlen_attention
from hal_attn.sequence_parallel import SequenceParallelGroups
from hal_attn.tuning import group, measuring
from hal_attn.tuning.group import GroupChoices
from hal_attn.tuning.race import Outcome
from hal_attn.tuning.record import Record
from tests.sequence_parallel.pool import Pool
from tests.support import dense, packed

NAMES = ("cpu_flash", "cpu_sdpa", "cpu_math")
FLASH, SDPA, MATH = (1.0, 2.0, 3.0), (2.0, 1.0, 3.0), (3.0, 2.0, 1.0)
ON = {"HAL_ATTN_AUTOTUNE": "on"}
CACHED = {"HAL_ATTN_AUTOTUNE": "cached"}


@pytest.fixture(scope="module")
def pools():
    made = {}
    yield lambda world: made.setdefault(world, Pool(world))
    for pool in made.values():
        pool.close()


@pytest.fixture
def heads():
    """A number of heads that no other test has: what ranks settled on stays with their group."""
    _HEADS.append(len(_HEADS) + 3)
    return _HEADS[-1]


_HEADS: list[int] = []


def rank():
    return torch.distributed.get_rank()


class Measuring:
    """The race with `times` of this rank; `races` counts them. `folder` is this rank's cache folder."""

    def __init__(self, times, folder):
        self.times, self.races = dict(zip(NAMES, times[rank()], strict=True)), 0
        self.patches = [
            mock.patch.object(measuring, "race", self._race),
            mock.patch.object(memo, "_bound", {}),
            mock.patch.object(memo, "_recent", {}),
            mock.patch.dict(os.environ, {"HAL_ATTN_CACHE_DIR": str(folder)}),
        ]

    def _race(self, names, sample):
        self.races += 1
        return Outcome({name: self.times[name] for name in names}, {}, 5)

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in reversed(self.patches):
            patch.stop()


def call(lengths, heads):
    """Batched calls of these lengths -> what was chosen for each."""
    chosen = []
    for length in lengths:
        tensors = dense(1, length, heads=heads)
        attention(*tensors)
        chosen.append(explain(*tensors).chosen.name)
    return chosen


def calls(times, folders, lengths, heads):
    """This rank's calls -> (what was chosen, how often this rank measured)."""
    with Measuring(times, folders[rank()]) as measuring_:
        return call(lengths[rank()], heads), measuring_.races


@pytest.mark.parametrize("world", [2, 3])
def test_on_one_host_one_rank_measures_for_all(pools, world, heads, tmp_path):
    times = (FLASH, SDPA, MATH)[:world]
    found = pools(world).run(calls, times, [tmp_path] * world, [(8,)] * world, heads, environ=ON)
    assert len({tuple(chosen) for chosen, _ in found}) == 1
    assert sum(races for _, races in found) == 1


@pytest.mark.parametrize("world", [2, 3])
def test_hosts_agree_though_each_measures(pools, world, heads, tmp_path):
    """Each has a folder, and another winner."""
    folders = [tmp_path / str(number) for number in range(world)]
    found = pools(world).run(calls, (FLASH, SDPA, MATH)[:world], folders, [(8,)] * world, heads, environ=ON)
    assert len({tuple(chosen) for chosen, _ in found}) == 1
    assert 1 <= sum(races for _, races in found) <= world


def test_ranks_may_call_in_any_order(pools, heads, tmp_path):
    lengths = [(8, 16, 24), (24, 8, 16), (16, 24, 8)]
    folders = [tmp_path / str(number) for number in range(3)]
    found = pools(3).run(calls, (FLASH, SDPA, MATH), folders, lengths, heads, environ=ON)
    by_length = [dict(zip(order, chosen, strict=True)) for order, (chosen, _) in zip(lengths, found, strict=True)]
    assert by_length[0] == by_length[1] == by_length[2]


def test_a_rank_that_never_calls_is_not_waited_for(pools, heads, tmp_path):
    folders = [tmp_path / str(number) for number in range(3)]
    found = pools(3).run(calls, (MATH, FLASH, SDPA), folders, [(8, 16), (16,), ()], heads, environ=ON)
    assert found[0][0][1] == found[1][0][0]
    assert found[2] == ([], 0)


def later(times, folders, heads):
    """Rank 0 calls, then the others."""
    with Measuring(times, folders[rank()]) as measuring_:
        if rank() == 0:
            call((8,), heads)
        torch.distributed.barrier()
        return call((8,), heads), measuring_.races


def test_the_first_decision_counts_for_whoever_comes_later(pools, heads, tmp_path):
    folders = [tmp_path / str(number) for number in range(2)]
    found = pools(2).run(later, (MATH, FLASH), folders, heads, environ=ON)
    assert found == [(["cpu_math"], 1), (["cpu_math"], 0)]


def test_what_only_one_host_had_kept_is_used_by_all_or_by_none(pools, heads, tmp_path):
    """`cached`: rank 0 has a file, rank 1 none. Whoever decides first decides for both."""
    folders = [tmp_path / "kept", tmp_path / "none"]
    with MeasuringAlone(SDPA, folders[0]):
        call((8,), heads)
    assert pools(2).run(later, (FLASH, FLASH), folders, heads, environ=CACHED) == [(["cpu_sdpa"], 0)] * 2


def test_without_anything_kept_the_order_is_the_decision(pools, heads, tmp_path):
    folders = [tmp_path / "none", tmp_path / "kept"]
    with MeasuringAlone(SDPA, folders[1]):
        call((8,), heads)
    assert pools(2).run(later, (FLASH, FLASH), folders, heads, environ=CACHED) == [(["cpu_flash"], 0)] * 2


class MeasuringAlone(Measuring):
    """The same in this process, which has no group."""

    def __init__(self, times, folder):
        with mock.patch(f"{__name__}.rank", return_value=0):
            super().__init__([times], folder)
        self.patches.append(mock.patch.dict(os.environ, ON))


def told(times, folders, heads):
    with Measuring(times, folders[rank()]):
        call((8,), heads)
        torch.distributed.barrier()
        return explain(*dense(1, 8, heads=heads)).measurement.origin


def test_explain_says_that_the_group_decided(pools, heads, tmp_path):
    folders = [tmp_path / str(number) for number in range(2)]
    for origin in pools(2).run(told, (SDPA, MATH), folders, heads, environ=ON):
        assert origin.startswith("the process group, from ")
        assert str(tmp_path) in origin


def asked(folders, heads):
    """A question before any call, then the call of rank 0 alone."""
    with Measuring((MATH, MATH), folders[rank()]):
        before = explain(*dense(1, 8, heads=heads)).source
        torch.distributed.barrier()
        return before, (call((8,), heads) if rank() == 0 else None)


def test_a_question_decides_nothing(pools, heads, tmp_path):
    folders = [tmp_path / str(number) for number in range(2)]
    found = pools(2).run(asked, folders, heads, environ=ON)
    assert found == [("the default order of cpu", ["cpu_math"]), ("the default order of cpu", None)]


# A plan


def planned(times, folders, heads, mode, lengths=(64, 40), causal=True, backend=None):
    """What a plan over all ranks runs on -> (agreed backends, right, how often this rank measured)."""
    lengths = list(lengths)
    with Measuring(times, folders[rank()]) as measuring_:
        plan = SequenceParallelGroups.create(**{mode: 2}).plan(lengths=lengths, causal=causal)
        query, key, value, sequences = packed(lengths, heads=heads)
        local = [plan.shard(query), plan.shard_kv(key), plan.shard_kv(value)]
        output = plan.gather(plan.attention(*local, backend=backend))
        right = varlen_attention(query, key, value, sequences=sequences, causal=causal, backend="cpu_math")
        return plan.backends, torch.allclose(output, right, atol=1e-5), measuring_.races


@pytest.mark.parametrize(
    ("times", "best"),
    [
        (((1.0, 2.0, 9.0), (9.0, 2.0, 1.0)), "cpu_sdpa"),
        (((5.0, 6.0, 1.0), (1.0, 6.0, 2.0)), "cpu_math"),
    ],
    ids=["the best of neither", "the slowest rank's"],
)
def test_the_slowest_rank_counts_in_a_plan(pools, heads, tmp_path, times, best):
    """Of 97 tokens one rank has 49 and one 48: all calls, two on each rank, are of other classes, and measured once."""
    folders = [tmp_path / str(number) for number in range(2)]
    found = pools(2).run(planned, times, folders, heads, "kv_gather", (97,), False, environ=ON)
    assert found == [((best,), True, 2)] * 2


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_plans_of_every_mode_agree(pools, heads, tmp_path, mode):
    """Where ranks have calls of one class, the first decision about it counts for both."""
    folders = [tmp_path / str(number) for number in range(2)]
    (first, *_), (second, *_) = found = pools(2).run(planned, (MATH, SDPA), folders, 2 * heads, mode, environ=ON)
    assert first == second
    assert first[0] in ("cpu_math", "cpu_sdpa")
    assert all(right for _, right, _ in found)


def test_a_named_backend_is_not_measured_in_a_plan(pools, heads, tmp_path):
    folders = [tmp_path / str(number) for number in range(2)]
    found = pools(2).run(planned, (MATH, MATH), folders, heads, "ring", (64, 40), True, "cpu_sdpa", environ=ON)
    assert found == [(("cpu_sdpa",), True, 0)] * 2


@pytest.mark.parametrize("environ", [CACHED, {}], ids=["cached", "off"])
def test_a_plan_measures_only_where_it_may(pools, heads, tmp_path, environ):
    folders = [tmp_path / str(number) for number in range(2)]
    found = pools(2).run(planned, (MATH, MATH), folders, heads, "ring", environ=environ)
    assert found == [(("cpu_flash",), True, 0)] * 2


# A store that fails


class BrokenStore:
    def check(self, keys):
        raise ConnectionError("the store is gone")

    def compare_set(self, key, expected, wanted):
        raise ConnectionError("the store is gone")


class TornStore:
    def check(self, keys):
        return True

    def get(self, key):
        return b'{"milliseconds": '

    def compare_set(self, key, expected, wanted):
        return b"[1]"


@pytest.mark.parametrize("store", [BrokenStore(), TornStore()], ids=["gone", "foreign"])
def test_a_store_that_fails_costs_only_the_agreement(store, caplog):
    mine = Record((("a", 1.0),), (), 5, "2026")
    choices = GroupChoices(store, "digest")
    assert choices.find("one") is None
    assert choices.settle("one", mine) == mine
    assert "cannot agree" in caplog.text


def test_what_the_store_holds_is_a_record_and_its_origin():
    class Store:
        def __init__(self):
            self.held = {}

        def check(self, keys):
            return all(key in self.held for key in keys)

        def get(self, key):
            return self.held[key]

        def compare_set(self, key, expected, wanted):
            return self.held.setdefault(key, wanted.encode())

    store = Store()
    first, second = (Record((("a", ms),), (), 5, "2026", origin="a file") for ms in (1.0, 2.0))
    assert GroupChoices(store, "digest").settle("one", first).milliseconds == (("a", 1.0),)
    settled = GroupChoices(store, "digest").settle("one", second)
    assert (settled.milliseconds, settled.origin) == ((("a", 1.0),), "the process group, from a file")
    assert GroupChoices(store, "other").find("one") is None
    assert GroupChoices(store, "digest").find("two") is None
    assert all(json.loads(text) for text in store.held.values())


def test_no_group_no_agreement():
    assert GroupChoices.of_process("digest") is None
    assert group.ORIGIN == "the process group"
