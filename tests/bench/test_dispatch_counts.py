"""How often a call is made in a round of `hal-attn bench dispatch`."""

import pytest
import torch

from hal_attn.bench.dispatch import run
from hal_attn.bench.dispatch.calls import Timed
from hal_attn.bench.dispatch.run import Effort


@pytest.mark.parametrize(("us", "calls"), [(10.0, 300), (100.0, 100), (60_000.0, 1)])
def test_what_only_the_first_call_does_takes_no_calls_from_the_rounds(monkeypatch, us, calls):
    """An import of half a second, say."""
    counts = []

    def scripted(device, timed, count):
        counts.append(count)
        return us + (500_000.0 / count if len(counts) == 1 else 0.0)

    monkeypatch.setattr(run, "_time", scripted)
    one = Timed("one", "group", lambda: None)
    found = run._times(torch.device("cpu"), [one], Effort(2, 300), lambda *_: None)
    assert counts[-2:] == [calls, calls]
    assert found == {"one": [us, us]}
