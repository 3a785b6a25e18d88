"""Random cases over real ranks against the oracle: `python -m tests.sequence_parallel.fuzz WORLD COUNT` prints how many
of each mode were run, and the largest errors."""

import sys
from collections import Counter, defaultdict

from hypothesis import HealthCheck, given, seed, settings

from tests.sequence_parallel.case import Errors, assert_right
from tests.sequence_parallel.pool import Pool
from tests.sequence_parallel.strategies import cases


def run(pool, world, count, number=None):
    """Runs `count` cases -> (cases by mode, largest errors by dtype). `number` draws others than the usual ones."""
    modes, errors = Counter(), defaultdict(Errors)

    def check(case):
        errors[str(case.dtype).removeprefix("torch.")].add(assert_right(pool, case))
        modes[str(case.degrees)] += 1

    chosen = settings(
        max_examples=count,
        deadline=None,
        derandomize=number is None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    test = chosen(given(cases(world))(check))
    (test if number is None else seed(number)(test))()
    return modes, dict(errors)


def main(world, count, number=None):
    with Pool(world) as own:
        modes, errors = run(lambda _: own, world, count, number)
    print(f"{world} ranks: {modes.total()} cases:", ", ".join(f"{mode} {n}" for mode, n in sorted(modes.items())))
    for dtype, found in sorted(errors.items()):
        print(f"  {dtype}:", ", ".join(f"{name} {error:.2g}" for name, error in vars(found).items()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
