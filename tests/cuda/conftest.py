"""Simulated NVIDIA devices."""

import pytest


@pytest.fixture
def simulate(monkeypatch):
    """Turns a simulated device on: `simulate("sm90,fa3=full")`."""

    def turn_on(text="sm90"):
        monkeypatch.setenv("HAL_ATTN_SIMULATE", f"cuda:{text}")

    return turn_on
