"""The Ascend contract environment: the real torch_npu on a machine without CANN, and the tests that run in it.

    python3 ci/ascend_contract/environment.py install [--folder .venv-ascend]
    python3 ci/ascend_contract/environment.py run [--folder .venv-ascend] [PYTEST ARGUMENTS]

`install` makes a virtual environment with PyTorch's CPU build, torch_npu, this project and its test needs, and builds
stand-ins for the CANN libraries (`cann_stub.py`). It does nothing when the folder already has what it would make.
`run` does the same first, then runs pytest there, without HAL_ATTN_* variables, on `tests/vendors/ascend_contract`
unless other paths are given.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONSTRAINTS = ROOT / "ci" / "constraints-cpu.txt"
COMMON = ROOT / "ci" / "constraints-common.txt"
STUB = HERE / "cann_stub.py"
# PyTorch first and alone, pinned by the constraints: a looser request would bring a build for an accelerator.
STEPS = (
    ("torch",),
    ("torch_npu==2.13.0", "pyelftools"),
    ("--editable", str(ROOT), "pytest", "pytest-xdist", "hypothesis"),
)
CONTRACT = "tests/vendors/ascend_contract"


def fingerprint() -> str:
    """Changes with anything that the environment is made from."""
    made_from = (Path(__file__), STUB, CONSTRAINTS, COMMON, ROOT / "pyproject.toml")
    content = b"".join(path.read_bytes() for path in made_from)
    return hashlib.sha256(content + sys.version.encode() + str(ROOT).encode()).hexdigest()


def install(folder: Path) -> None:
    """Make the environment in `folder`, unless its stamp says that it is there."""
    stamp = folder / ".made-from"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == fingerprint():
        return
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise SystemExit(f"{folder} is not a virtual environment and not empty: name another --folder")
    venv.create(folder, with_pip=True, clear=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    python = folder / "bin" / "python"
    # Without CANN, importing torch loads torch_npu and fails, and so does every build that imports torch.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", CONSTRAINTS)
    for step in STEPS:
        subprocess.run([*pip, *step], env=environment, check=True)
    subprocess.run([python, STUB, folder / "cann-stub"], env=environment, check=True)
    stamp.write_text(fingerprint(), encoding="utf-8")


def run(folder: Path, arguments: list[str]) -> int:
    """Run pytest in the environment, with the stand-ins on the library path; its exit status."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HAL_ATTN_")}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    libraries = (str(folder / "cann-stub"), os.environ.get("LD_LIBRARY_PATH"))
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    environment["ASCEND_CONTRACT"] = "1"
    if not any(Path(ROOT, argument.split("::")[0]).exists() for argument in arguments):
        arguments = [CONTRACT, *arguments]
    command = [str(folder / "bin" / "python"), "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("install", "run"))
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-ascend", help="where the environment is")
    options, arguments = parser.parse_known_args()
    folder = options.folder.resolve()
    if options.command == "install" and arguments:
        parser.error(f"install takes no {' '.join(arguments)}")
    install(folder)
    if options.command == "run":
        raise SystemExit(run(folder, arguments))


if __name__ == "__main__":
    main()
