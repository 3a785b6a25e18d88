"""On a real NVIDIA device: no call waits for it, and graphs replay with other values."""

import pytest
import torch

from tests.cuda import hardware, unattended

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", hardware.CALLS)
@pytest.mark.parametrize("backend", hardware.BACKENDS)
def test_never_waits_and_replays(backend, name):
    assert torch.cuda.is_available(), "these tests were asked for, and there is no NVIDIA device"
    reason = hardware.unavailable(backend)
    if reason is None:
        done = unattended.cell(backend, name)
        assert done.startswith("refused") or done.endswith("graph")
    else:
        assert backend not in hardware.OWN, str(reason)
        assert "broken" not in str(reason), str(reason)
