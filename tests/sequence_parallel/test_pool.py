"""The pool itself: ranks talk to one another, and none of their troubles goes unseen."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.sequence_parallel.pool import Pool, PoolError


def total(value):
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor.item()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"from rank {rank}")
    return dist.get_rank()


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


def variable():
    return os.environ.get("HAL_ATTN_BACKEND"), torch.get_num_threads()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_work_together(pool, world):
    assert pool(world).run(total, 10) == [10 * world + sum(range(world))] * world


def test_variables_are_those_of_one_job(pool):
    assert pool(2).run(variable, environ={"HAL_ATTN_BACKEND": "cpu_math"}) == [("cpu_math", 1)] * 2
    assert pool(2).run(variable) == [(None, 1)] * 2


def test_a_failure_is_told_with_its_traceback_and_the_pool_starts_anew():
    with Pool(2) as own:
        with pytest.raises(PoolError, match=r"rank 1:\n(.*\n)*.*in fail_on\n(.*\n)*ValueError: from rank 1"):
            own.run(fail_on, 1)
        assert own.run(total, 0) == [1, 1]


def test_an_error_that_is_awaited_and_missing_is_an_error():
    with Pool(2) as own, pytest.raises(PoolError, match="rank 0: no error"):
        own.errors(fail_on, 1)


def test_a_rank_that_dies_is_told():
    with Pool(2) as own, pytest.raises(PoolError, match="rank 1:\ndied with exit code 3"):
        own.run(die_on, 1)


def test_a_rank_that_hangs_is_told_with_its_stack():
    with Pool(2) as own:
        outcomes = own.outcomes(sleep_on, 0, seconds=2)
        assert "in sleep_on" in outcomes[0].trace
        assert outcomes[1].trace is None
