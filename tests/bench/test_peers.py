"""A peer's stand-ins for kernels are the peer's alone."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from hal_attn.bench.dispatch.peers import _stand_in

NAME = "flash_attn_interface"


@pytest.mark.parametrize("installed", [False, True])
def test_the_stand_in_for_flash_attention_3_is_not_found_by_others(monkeypatch, installed):
    real = ModuleType(NAME)
    if installed:
        monkeypatch.setitem(sys.modules, NAME, real)
    else:
        monkeypatch.delitem(sys.modules, NAME, raising=False)
    imported = []

    def lazy_import(name):
        imported.append(sys.modules[NAME])

    utils = SimpleNamespace(lazy_import_flash_attention=lazy_import, _loaded_implementation="flash_attention_3")
    with _stand_in(utils):
        assert imported
        assert imported[0] is not real
        assert sys.modules.get(NAME) is (real if installed else None)
    assert utils._loaded_implementation is None
    assert sys.modules.get(NAME) is (real if installed else None)
