"""The backends on a real NVIDIA device: `python -m pytest -m cuda -s tests/cuda/test_hardware.py`."""

import pytest
import torch

from tests.cuda import hardware

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def cells():
    """What each test found, printed as one table at the end."""
    assert torch.cuda.is_available(), "these tests were asked for, and there is no NVIDIA device"
    found = {}
    yield found
    print("\n" + torch.cuda.get_device_name(), torch.__version__, sep=", ")
    print("\n".join([*hardware.table(found), "", *hardware.chosen()]))


@pytest.fixture
def installed(cells):
    """Asks for a backend: True, or False where its library is not installed; a library that is broken fails."""

    def ask(backend):
        reason = hardware.unavailable(backend)
        if reason is None:
            return True
        assert backend not in hardware.OWN, str(reason)
        assert "broken" not in str(reason), str(reason)
        return False

    return ask


@pytest.mark.parametrize("name", hardware.CALLS)
@pytest.mark.parametrize("backend", hardware.BACKENDS)
def test_right_or_refused(cells, installed, backend, name):
    if not installed(backend):
        cells[backend, name] = f"absent: {hardware.unavailable(backend)}"
        return
    cells[backend, name] = "WRONG"
    cells[backend, name] = hardware.cell(backend, name)


@pytest.mark.parametrize("backend", ["flash_attn", "torch_cudnn", "torch_flash", "torch_efficient", "torch_math"])
def test_dropout_keeps_the_mean(installed, backend):
    if installed(backend):
        torch.manual_seed(0)
        assert hardware.dropout_ratio(backend) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("backend", hardware.BACKENDS)
def test_packed_calls_never_wait(installed, backend):
    if installed(backend):
        first, second = hardware.packed_call_twice(backend)
        # No order of sums was asked for.
        torch.testing.assert_close(second, first)


MANY = [(70_000, 2, 2), (400, 10_496, 128)]


@pytest.mark.parametrize(("count", "queries", "keys"), MANY, ids=["grid", "2^31"])
@pytest.mark.parametrize("backend", [None, *hardware.BACKENDS])
def test_many_sequences_are_right_to_the_last(installed, backend, count, queries, keys):
    """More than a dimension of a grid counts, and more elements than 32 bits do: right, or refused by name."""
    if backend is None or installed(backend):
        found = hardware.difference_at_the_end(backend, count, queries, keys)
        assert found is None or found < 2**-5
        assert backend is not None or found is not None


def test_the_choice_for_measured_shapes_is_made(cells):
    assert len(hardware.chosen()) == len(hardware.SHAPES) + len(hardware.PACKED_SHAPES)
