"""Whose name counts: distributions that claim a name that is taken, and devices that are somebody else's."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest

from hal_attn import attention, backends, explain, platforms
from hal_attn.registry import Registry
from tests.cli.conftest import run, words  # noqa: F401
from tests.detection.conftest import Stubs
from tests.fakes import fresh, install  # noqa: F401
from tests.support import dense

PLUGIN = """
from tests.fakes import BatchedFake, FakePlatform

class Plugin(FakePlatform):
    def __init__(self):
        super().__init__({name!r}, BatchedFake({backend!r}), device_type={device!r})
"""


@pytest.fixture
def declare(monkeypatch, tmp_path):
    """Installs a distribution that declares a platform: its metadata and one module, first on the path."""
    monkeypatch.syspath_prepend(tmp_path)
    stubs, modules = Stubs(tmp_path), []

    def declared(distribution, name, *, source=None, value=None, device="cpu"):
        module = distribution.replace("-", "_")
        text = PLUGIN.format(name=name, backend=f"{module}_kernel", device=device) if source is None else dedent(source)
        stubs.module(f"{module}.py", text)
        entry = f"[hal_attn.platforms]\n{name} = {value or f'{module}:Plugin'}\n"
        stubs.distribution(distribution, "1.0", entry)
        modules.append(module)

    yield declared
    for module in modules:
        sys.modules.pop(module, None)


def taken_in(monkeypatch) -> Registry:
    return install(monkeypatch, registry=Registry.from_entry_points())


def test_a_name_of_hal_attn_cannot_be_taken(declare, monkeypatch, run):  # noqa: F811
    declare("impostor", "cpu")
    registry = taken_in(monkeypatch)
    assert type(registry.platform("cpu")).__module__ == "hal_attn_cpu.platform"
    (broken,) = registry.broken
    assert broken.name == "cpu of impostor 1.0"
    assert "the platform name cpu is taken by hal-attn " in broken.reason
    assert explain(*dense()).chosen.name == "cpu_flash"
    assert "impostor_kernel" not in {status.name for status in backends()}
    doctor = run("doctor")
    assert doctor.exit_code == 1
    assert "the plugin cpu of impostor 1.0 is broken; reinstall or remove impostor 1.0" in words(doctor.stdout)
    assert "cpu_flash cpu usable" in words(doctor.stdout)


def test_of_two_strangers_with_one_name_the_first_distribution_keeps_it(declare, monkeypatch):
    declare("zebra", "acme", device="meta")
    declare("aardvark", "acme", device="meta")
    registry = taken_in(monkeypatch)
    assert [status.name for status in backends("meta")] == ["aardvark_kernel"]
    assert [broken.name for broken in registry.broken] == ["acme of zebra 1.0"]
    assert "taken by aardvark 1.0" in registry.broken[0].reason


def test_a_plugin_gets_the_cpu_only_where_it_is_named(declare, monkeypatch):
    declare("aardvark", "aardvark")
    taken_in(monkeypatch)
    assert explain(*dense()).platform.name == "cpu"
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "aardvark")
    assert explain(*dense()).chosen.name == "aardvark_kernel"


@pytest.mark.parametrize(
    ("source", "value", "reason"),
    [
        ("raise OSError('libacme.so: cannot open')", None, "OSError: libacme.so: cannot open"),
        ("import sys; sys.exit(3)", None, "SystemExit: 3"),
        ("def (", None, "SyntaxError"),
        ("", "vendor_of_nothing:Plugin", "ModuleNotFoundError"),
        ("", None, "AttributeError"),
        ("", "acme", "gives a module, not a hal_attn.Platform"),
    ],
    ids=["raises", "exits", "no Python", "no module", "no class", "no class named"],
)
def test_a_module_that_cannot_be_imported(declare, monkeypatch, source, value, reason):
    declare("acme", "acme", source=source, value=value)
    registry = taken_in(monkeypatch)
    (broken,) = registry.broken
    assert (broken.name, broken.distribution) == ("acme", "acme 1.0")
    assert reason in broken.reason
    status = {status.name: status for status in platforms()}["acme"]
    assert status.remedy == "reinstall or remove acme 1.0"
    assert attention(*dense()).shape == dense()[0].shape
