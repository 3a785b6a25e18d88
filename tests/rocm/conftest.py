"""What the AMD tests share: a simulated device and why a backend does not take a call."""

import pytest

from hal_attn import explain
from hal_attn.registry import default_registry


@pytest.fixture
def simulate(monkeypatch):
    """Makes CPU tensors those of one simulated AMD device, as `simulate("gfx942,empty_lse=nan")`."""

    def choose(device):
        monkeypatch.setenv("HAL_ATTN_SIMULATE", f"rocm:{device}")
        return default_registry().simulation(f"rocm:{device}")

    return choose


@pytest.fixture
def refusals():
    """By rule, what a backend refuses of a call and why."""

    def ask(backend, *tensors, **options):
        considered = {each.backend.name: each.refusals for each in explain(*tensors, **options).considered}
        return {refusal.rule: str(refusal) for refusal in considered[backend]}

    return ask
