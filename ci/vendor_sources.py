"""Fetch the vendors' newest wheels and unpack their Python sources, for tests that compare signatures.

    python3 ci/vendor_sources.py DIR

Nothing of the packages is built, installed or run. A package that DIR already has is left as it is: remove DIR to look
for newer releases. `tests/vendors/test_installed_sources.py` names the packages that are not fetched, and says why.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

PACKAGES = ("amd-aiter", "fa3-fwd", "flash-attn-4", "torch-npu")
# One platform whatever machine this runs on, since only Python files are kept; --pre, for amd-aiter and flash-attn-4
# publish pre-releases alone.
DOWNLOAD = (
    *("--quiet", "--disable-pip-version-check", "--no-deps", "--pre", "--only-binary=:all:"),
    *("--python-version", "3.11", "--implementation", "cp"),
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_24_x86_64"),
    *("--platform", "manylinux2014_x86_64"),
)


def fetch(package: str, folder: Path) -> None:
    """Download the package's newest wheel and leave its Python files and metadata in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", *DOWNLOAD, "--dest", scratch, package], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                unpacked, [name for name in archive.namelist() if name.endswith((".py", ".dist-info/METADATA"))]
            )
        shutil.move(unpacked, folder)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: vendor_sources.py DIR")
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if not (root / package).is_dir():
            fetch(package, root / package)
        (distribution,) = distributions(path=[str(root / package)])
        print(f"{package} {distribution.version}")


if __name__ == "__main__":
    main()
