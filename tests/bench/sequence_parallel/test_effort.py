"""How many layers a sample has, and that both calls are sampled in turns."""

import pytest
import torch

from hal_attn.bench.sequence_parallel.effort import Effort, in_turns
from hal_attn.bench.sequence_parallel.ranks import Ranks


@pytest.mark.parametrize(
    ("milliseconds", "layers"), [(1000.0, 3), (160.0, 3), (100.0, 3), (40.0, 8), (4.1, 74), (3.0, 96), (0.01, 96)]
)
def test_short_layers_make_long_samples(milliseconds, layers):
    assert Effort(5, 3, seconds=0.3).layers_of(milliseconds) == layers
    assert Effort(5, 3).layers_of(milliseconds) == 3


def test_the_whole_problem_and_the_part_take_turns():
    calls = []
    alone, ms = in_turns(
        Ranks(0, 1, torch.device("cpu")), lambda: calls.append("whole"), lambda: calls.append("part"), Effort(2, 3, 1)
    )
    assert calls == ["part"] * 2 + (["whole"] * 3 + ["part"] * 3) * 2
    assert alone > 0
    assert ms > 0
