"""Pools of ranks by their size, for the whole session; and the switch for tests on a real device."""

import pytest

from tests.sequence_parallel.pool import Pool


@pytest.fixture(scope="session")
def pool():
    """`pool(world)`: that many ranks."""
    pools = {}

    def of(world):
        return pools.setdefault(world, Pool(world))

    yield of
    for each in pools.values():
        each.close()


def pytest_collection_modifyitems(config, items):
    """Without `-m`, tests that need a device are deselected; with `-m cuda` they run, and fail where there is none."""
    if config.option.markexpr:
        return
    away = [item for item in items if item.get_closest_marker("cuda") is not None]
    if away:
        config.hook.pytest_deselected(items=away)
        items[:] = [item for item in items if item not in away]
