"""What all tests share: hypothesis profiles, and an environment free of HAL_ATTN_* variables."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Tests run side by side; threads of one that wait for those of another take ten times as long.
torch.set_num_threads(1)

settings.register_profile(
    "default", max_examples=1000, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    """Each test starts without HAL_ATTN_* variables, whatever the shell that runs it has."""
    for name in list(os.environ):
        if name.startswith("HAL_ATTN_"):
            monkeypatch.delenv(name)
