"""Importing the package and calling it on the CPU, in a fresh process beside vendor packages that are broken."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
import hal_attn
loaded = [name for name in ("aiter", "flash_attn", "torch_npu") if name in sys.modules]
assert not loaded, f"the import loaded {loaded}"
query = torch.ones(1, 2, 1, 4)
assert torch.equal(hal_attn.attention(query, query, query), query)
listed = {platform.name: platform.available for platform in hal_attn.platforms()}
assert listed["cpu"], listed
assert not torch.cuda.is_initialized()
print("all well")
"""
STUBS = {
    "a ROCm package that raises on an unknown device": {"aiter": "raise RuntimeError('unknown gfx target')"},
    "a CUDA package with a missing symbol": {"flash_attn": "raise ImportError('undefined symbol: _ZN3c10')"},
    "an NPU package whose probe raises": {
        "torch_npu": """
import torch, types
class Npu(types.ModuleType):
    @staticmethod
    def is_available():
        raise RuntimeError("no device visible")
    @staticmethod
    def device_count():
        return 0
torch.npu = Npu("npu")
"""
    },
    "an NPU package that exits the process": {"torch_npu": "raise SystemExit(3)"},
    "empty packages of all vendors": {"aiter": "", "flash_attn": "", "torch_npu": ""},
}


@pytest.mark.parametrize("stubs", STUBS.values(), ids=STUBS)
def test_a_broken_vendor_package_stops_neither_the_import_nor_the_cpu(stubs, tmp_path):
    for name, source in stubs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HAL_ATTN_")}
    path = os.pathsep.join(filter(None, [str(tmp_path), environment.get("PYTHONPATH")]))
    # PyTorch itself loads torch_npu at import unless it is told not to.
    environment |= {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all well"
