"""Every argument of every backend is honoured or refused by its name: one test a cell of the tables of `arguments`."""

import pytest

from tests.arguments import cells, simulating, verdict


@pytest.mark.parametrize(("platform", "backend", "packed", "argument"), cells())
def test_argument(platform, backend, packed, argument):
    with simulating(platform):
        answer = verdict(backend, packed, argument)
    assert answer == "honoured" or answer.startswith("refused: ")
