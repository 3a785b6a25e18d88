"""Every argument of every backend is honoured or refused by its name: one test a cell of the tables of `arguments`."""

import pytest

from tests.arguments import assert_right_at_scale, cells, columns, simulating, verdict


@pytest.mark.parametrize(("platform", "backend", "packed", "argument"), cells())
def test_argument(platform, backend, packed, argument):
    with simulating(platform):
        answer = verdict(backend, packed, argument)
    assert answer == "honoured" or answer.startswith("refused: ")


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("platform", "backend", "packed"), columns())
def test_scale_at_or_below_0(platform, backend, packed, causal, scale):
    with simulating(platform):
        assert_right_at_scale(backend, packed, causal, scale)
