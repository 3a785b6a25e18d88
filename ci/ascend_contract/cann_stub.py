"""Build stand-ins for the CANN libraries that the installed torch_npu links, so that it can be imported without CANN.

    python ci/ascend_contract/cann_stub.py DIR      (with torch and torch_npu installed in that Python)

The libraries and the functions are read from the wheel: each NEEDED library that the loader cannot find is built, and
each has every function that torch_npu leaves undefined and neither PyTorch nor the system defines. All return 0, but
for those in `ANSWERS`. They serve tests: no device is simulated, only the import and the operator registrations work.
"""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

# torch_npu must not load before there is a stub to load it with.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch
from elftools.elf.elffile import ELFFile

# Meta kernels ask for the device generation; torch_npu knows it by this name.
ANSWERS = {"aclrtGetSocName": 'const char *name = getenv("CANN_STUB_SOC"); return (long)(name ? name : "Ascend910B1");'}


def read(libraries: list[Path]) -> tuple[set[str], set[str]]:
    """What the libraries need from elsewhere: library names, and symbols that must be there when they load."""
    needed: set[str] = set()
    undefined: set[str] = set()
    defined: set[str] = set()
    for library in libraries:
        with library.open("rb") as file:
            elf = ELFFile(file)
            needed |= {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols():
                if symbol["st_shndx"] != "SHN_UNDEF":
                    defined.add(symbol.name)
                elif symbol["st_info"]["bind"] != "STB_WEAK":
                    undefined.add(symbol.name)
    return needed - {library.name for library in libraries}, undefined - defined - {""}


def load(names: set[str]) -> tuple[list[ctypes.CDLL], list[str]]:
    """The named libraries that PyTorch or the system has, this process among them, and the names of the others."""
    torch_libraries = Path(torch.__file__).parent / "lib"
    loaded, missing = [ctypes.CDLL(None)], []
    for name in sorted(names):
        path = torch_libraries / name
        try:
            loaded.append(ctypes.CDLL(str(path) if path.exists() else name))
        except OSError:
            missing.append(name)
    return loaded, missing


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise SystemExit("torch_npu is not installed in this Python")
    needed, undefined = read(sorted(Path(spec.origin).parent.rglob("*.so")))
    loaded, missing = load(needed)
    functions = sorted(name for name in undefined if not any(hasattr(library, name) for library in loaded))
    source = folder / "cann_stub.c"
    bodies = [f"long {name}(void) {{ {ANSWERS.get(name, 'return 0;')} }}" for name in functions]
    source.write_text("\n".join(["#include <stdlib.h>", *bodies, ""]), encoding="utf-8")
    for name in missing:
        # -w: the compiler's own idea of functions such as snprintf_s does not matter here.
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", folder / name, source], check=True)
    print(f"{len(functions)} CANN functions in {len(missing)} libraries in {folder}: {', '.join(missing)}")


if __name__ == "__main__":
    main()
