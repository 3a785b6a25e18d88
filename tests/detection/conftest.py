"""Stub vendor packages, and fresh interpreters that see them: what a process imports is decided only once."""

import json
import os
import subprocess
import sys
from textwrap import dedent

import pytest

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
# HIP takes an empty list for none given.
HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "ASCEND_RT_VISIBLE_DEVICES": ""}


class Stubs:
    """A folder of stub packages that comes first on the path, for modules and for metadata alike."""

    def __init__(self, folder):
        self.folder = folder

    def module(self, path, source=""):
        """Write `path`, as in "aiter/__init__.py"."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(source))

    def distribution(self, name, version, entry_points=""):
        """Write the metadata of an installed distribution."""
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        self.module(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if entry_points:
            self.module(f"{info}/entry_points.txt", entry_points)


class Interpreter:
    """Runs code in a fresh process that sees the stubs and no device, whatever machine it is on.

    PyTorch loads no device extension there unless asked to.
    """

    def __init__(self, folder):
        self.folder = folder

    def start(self, code, **variables):
        environment = {name: value for name, value in os.environ.items() if name not in DEVICE_VARIABLES}
        environment |= {**HIDDEN, "PYTHONPATH": str(self.folder), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables}
        return subprocess.run(
            [sys.executable, "-c", dedent(code)], env=environment, capture_output=True, text=True, timeout=300
        )

    def __call__(self, code, **variables):
        """What the code prints last, as JSON."""
        done = self.start(code, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def stubs(tmp_path):
    return Stubs(tmp_path)


@pytest.fixture
def interpreter(tmp_path):
    return Interpreter(tmp_path)


@pytest.fixture
def cpu_build(monkeypatch):
    """PyTorch as its CPU build describes itself, whichever build runs the tests."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    for name in DEVICE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
