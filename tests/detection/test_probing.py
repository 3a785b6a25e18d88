"""The helpers that every vendor's detection is made of."""

import sys
from types import ModuleType

import pytest

from hal_attn.probing import attempt, import_failure, is_findable, version_of, versions_of


@pytest.fixture(autouse=True)
def _path(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)


def test_versions_come_from_metadata_and_import_nothing(stubs):
    stubs.module("some_vendor/__init__.py", "raise RuntimeError")
    stubs.distribution("some-vendor", "1.2.3")
    assert version_of("some-vendor") == version_of("some_vendor") == "1.2.3"
    assert versions_of("not-there-at-all", "some-vendor") == (("some-vendor", "1.2.3"),)
    assert "some_vendor" not in sys.modules


@pytest.mark.parametrize("text", ["", "Metadata-Version: 2.1\nName: some-vendor\n", None])
def test_damaged_metadata_is_unknown(stubs, text):
    stubs.module("some_vendor-1.2.3.dist-info/RECORD")
    if text is not None:
        stubs.module("some_vendor-1.2.3.dist-info/METADATA", text)
    assert version_of("some-vendor") == "unknown"


def test_attempt_gives_the_value_or_the_default_with_the_reason():
    assert attempt(lambda: 3, 0) == (3, "")
    assert attempt(lambda: 1 // 0, -1)[0] == -1
    assert attempt(lambda: 1 // 0, -1)[1].startswith("ZeroDivisionError: ")
    assert attempt(lambda: sys.exit(2), None) == (None, "SystemExit: 2")


def test_import_failure():
    assert import_failure("json") == ""
    assert import_failure("not_there_at_all") == "ModuleNotFoundError: No module named 'not_there_at_all'"


def test_findable_modules(stubs, monkeypatch):
    stubs.module("some_vendor/__init__.py", "raise RuntimeError")
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    assert is_findable("some_vendor")
    assert is_findable("made_by_hand")
    assert not is_findable("not_there_at_all")
