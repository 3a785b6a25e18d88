"""Virtual environments: empty, or over another interpreter, whose packages they see below their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from runner.environment import NoEnvironment


def create(interpreter: str, folder: Path, *, with_pip: bool) -> Path:
    """An empty environment in `folder`, in place of what is there; its interpreter."""
    command = [interpreter, "-m", "venv", "--clear", *([] if with_pip else ["--without-pip"]), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().replace("\n", " ")
        remedy = "the interpreter must have its venv module (Debian and Ubuntu: apt-get install python3-venv)"
        raise NoEnvironment(f"{interpreter} makes no virtual environment: {said}", remedy)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    """Where an environment's own packages are."""
    (found,) = folder.glob("lib/python3*/site-packages")
    return found


def lay_over(interpreter: str, folder: Path) -> None:
    """Let the environment in `folder` see the packages of `interpreter` as well.

    Not by --system-site-packages: where the interpreter is itself in a virtual environment, as in AMD's images, that
    would show the packages of the system and not those of the environment.
    """
    code = (
        "import site; print(*site.getsitepackages(), *[site.getusersitepackages()][: site.ENABLE_USER_SITE], sep='\\n')"
    )
    done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True)
    lines = [f"import site; site.addsitedir({path!r})\n" for path in done.stdout.splitlines()]
    (site_packages(folder) / "1-interpreter.pth").write_text("".join(lines), encoding="utf-8")
