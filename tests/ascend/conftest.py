"""Simulated Ascend devices, and a look at what reaches their operators.

`--ascend-library torch_npu` runs the same tests through an installed torch_npu: its schemas, its dispatcher and its
autograd, over the simulated kernels. It has one release only, so the tests of older ones are then left out.
"""

import pytest
from hal_attn_ascend.simulation.library import SimulatedOperator
from hal_attn_ascend.simulation.schemas import RELEASES

from hal_attn.registry import default_registry
from hal_attn.settings import read


def pytest_addoption(parser):
    parser.addoption("--ascend-library", choices=("simulated", "torch_npu"), default="simulated")


def library(config):
    return config.getoption("--ascend-library", default="simulated")


def pytest_generate_tests(metafunc):
    if "release" in metafunc.fixturenames:
        found = RELEASES if library(metafunc.config) == "simulated" else RELEASES[-1:]
        metafunc.parametrize("release", found)


@pytest.fixture
def simulate(monkeypatch, request):
    """Choose the simulated device for this test; returns its platform."""

    def choose(generation="Ascend910B1", **choices):
        choices = {"library": library(request.config), **choices}
        text = ",".join([generation, *(f"{name}={value}" for name, value in choices.items())])
        monkeypatch.setenv("HAL_ATTN_SIMULATE", f"ascend:{text}")
        return default_registry().simulation(read().simulate)

    return choose


class Call:
    """One call of an operator: its name, the names that were given, and all arguments by name."""

    def __init__(self, operator, arguments, options):
        self.name = operator.packet.__name__
        schema = operator.default._schema.arguments
        names = [argument.name for argument in schema]
        self.given = {*names[: len(arguments)], *options}
        self.arguments = {a.name: a.default_value for a in schema if a.has_default_value()}
        self.arguments |= {**dict(zip(names, arguments, strict=False)), **options}

    def __getitem__(self, name):
        return self.arguments[name]


@pytest.fixture
def calls(monkeypatch):
    """The calls that reach an operator, in order."""
    made = []
    original = SimulatedOperator.__call__

    def spy(self, *arguments, **options):
        made.append(Call(self, arguments, options))
        return original(self, *arguments, **options)

    monkeypatch.setattr(SimulatedOperator, "__call__", spy)
    return made
