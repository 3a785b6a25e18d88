"""The first look at a device: its files, whether this user may open them, and what the vendor's tool says."""

import os

import pytest
from runner import device
from runner.result import Status

FILES = {
    "cuda": ("nvidia0", "nvidiactl"),
    "rocm": ("kfd", "dri/renderD128"),
    "ascend": ("davinci3", "davinci_manager", "devmm_svm", "hisi_hdc"),
}
TOOLS = {"cuda": "nvidia-smi", "rocm": "rocminfo", "ascend": "npu-smi"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A machine without devices and tools; `add` puts device files there, `tool` a vendor's tool."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", str(commands))
    return tmp_path


def add(root, *names):
    for name in names:
        file = root / "dev" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def tool(root, name, status, said):
    script = root / "bin" / name
    script.write_text(f"#!/bin/sh\necho '{said}'\nexit {status}\n")
    script.chmod(0o755)


@pytest.mark.parametrize("platform", FILES)
def test_the_device_files_suffice(platform, root, options):
    add(root, *FILES[platform])
    found = device.check(options(platform), root)
    assert found.status is Status.PASSED
    assert f"{TOOLS[platform]}" in found.summary


@pytest.mark.parametrize(("platform", "left_out"), [(name, file) for name, files in FILES.items() for file in files])
def test_each_file_is_needed_and_the_missing_one_named(platform, left_out, root, options):
    add(root, *(file for file in FILES[platform] if file != left_out))
    found = device.check(options(platform), root)
    assert found.status is Status.FAILED
    (pattern,) = (p for p in options(platform).platform.device_files if (root / "dev" / left_out).match(p))
    assert f"no /{pattern};" in found.summary
    assert found.summary.count("no /") == 1
    assert found.remedy


@pytest.mark.parametrize("platform", FILES)
@pytest.mark.parametrize(("status", "expected"), [(0, Status.PASSED), (9, Status.FAILED)])
def test_the_tool_counts_where_the_files_are_elsewhere(platform, status, expected, root, options):
    tool(root, TOOLS[platform], status, "GPU 0: some device")
    found = device.check(options(platform), root)
    assert found.status is expected
    assert "GPU 0: some device" in found.summary
    assert ("exit status 9" in found.summary) == (status == 9)


def test_a_file_that_this_user_may_not_open_fails(root, options, monkeypatch):
    add(root, *FILES["rocm"])
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "kfd")
    found = device.check(options("rocm"), root)
    assert found.status is Status.FAILED
    assert found.summary == f"this user may not read and write {root / 'dev' / 'kfd'}"
    assert "group" in found.remedy


def test_the_cpu_is_always_there_and_a_simulation_asks_for_nothing(root, options):
    assert device.check(options("cpu"), root).status is Status.PASSED
    assert device.check(options("rocm", simulation="rocm"), root).status is Status.SIMULATED
