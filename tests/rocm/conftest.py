"""What the AMD tests share: a simulated device, the backends that take a call, and the switch for a real device."""

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


def pytest_collection_modifyitems(config, items):
    """Tests on a real device run when they are asked for, by `-m rocm`, and then fail without one."""
    if "rocm" in config.option.markexpr:
        return
    real = [item for item in items if item.get_closest_marker("rocm")]
    if real:
        items[:] = [item for item in items if item not in real]
        config.hook.pytest_deselected(items=real)
