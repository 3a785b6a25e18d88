"""Where the steps run: a Python and its variables, and what is installed there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner import constraints
from runner.platforms import ROOT, Platform


class NoEnvironment(Exception):
    """There is no environment for the steps; the arguments are the reason and the remedy."""


@dataclass(frozen=True)
class Environment:
    """`python` with `variables`.

    `why` says why the constraints did not make it, and is empty where they did; `over` is then the interpreter whose
    packages it uses.
    """

    python: Path
    variables: Mapping[str, str]
    why: str = ""
    over: str = ""

    def ask(self, code: str, *arguments: str) -> str:
        """What a few lines of Python print there."""
        command = [str(self.python), "-c", code, *arguments]
        variables = dict(self.variables)
        done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, check=False)
        if done.returncode != 0:
            raise NoEnvironment(f"{self.python} fails: {done.stderr.strip()[-300:]}", "see that it runs")
        return done.stdout

    def lacking(self, *modules: str) -> list[str]:
        """Which of these modules its interpreter does not find."""
        code = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
        return self.ask(code, *modules).split()

    def facts(self, pins: Mapping[str, str]) -> dict[str, object]:
        """Versions as installed, and which of them differ from `pins`."""
        code = (
            "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions()]))"
        )
        installed: dict[str, str] = {}
        for name, version in json.loads(self.ask(code)):
            # The first on the path is the one that is imported.
            if name:
                installed.setdefault(constraints.normal(name), version)
        python = self.ask("import platform; print(platform.python_version())").strip()
        return {
            "executable": str(self.python),
            "over": self.over,
            "why_not_pinned": self.why,
            "python": python,
            "torch": installed.get("torch", "not installed"),
            "differ": _differing(installed, pins),
            "installed": dict(sorted(installed.items())),
        }


def _differing(installed: Mapping[str, str], pins: Mapping[str, str]) -> list[str]:
    """Packages that are there in another version than pinned; a local part as in +cpu makes no difference."""
    return [
        f"{name} {installed[name]} (pinned {version})"
        for name, version in sorted(pins.items())
        if name in installed and installed[name].partition("+")[0] != version.partition("+")[0]
    ]


def variables_of(platform: Platform, *, simulated: bool) -> dict[str, str]:
    """This process's variables without HAL_ATTN_*, with those that the vendor's script sets on a real device."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HAL_ATTN_")}
    if simulated or not platform.set_env or platform.home in kept or not Path(platform.set_env).exists():
        return kept
    script = f"source {platform.set_env} >/dev/null && env -0"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=kept, check=False)
    pairs = (entry.partition("=") for entry in done.stdout.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs} if done.returncode == 0 else kept


def joined(*paths: object) -> str:
    """A value for PATH or PYTHONPATH."""
    return os.pathsep.join(str(path) for path in paths if path)
