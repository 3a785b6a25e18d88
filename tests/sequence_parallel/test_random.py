"""Random cases over real ranks: output, LSE and gradients of every rank, against the oracle of one process.

`python -m tests.sequence_parallel.fuzz WORLD COUNT` runs more of them and prints the largest errors.
"""

import pytest
from hypothesis import settings

from tests.sequence_parallel.fuzz import run

# In a thousand of the profile's.
SHARES = {2: 120, 3: 120, 4: 120}


@pytest.mark.parametrize("world", SHARES)
def test_random_cases(pool, world):
    count = settings.default.max_examples * SHARES[world] // 1000
    modes, _ = run(pool, world, count)
    assert modes.total() >= count // 2
    assert len(modes) == (5 if world == 4 else 3), "a mode was never drawn"
