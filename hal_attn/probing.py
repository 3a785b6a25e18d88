"""Questions that a platform's `detect` asks without breaking or initialising anything; no vendor is named here."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from hal_attn.guard import attempt
from hal_attn.platform import Detection


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution by its metadata alone, which imports nothing; None where there is none.

    Metadata is asked because a module's name can mislead: parts of one library installed alone make its name an empty
    namespace package. A distribution with damaged metadata is "unknown".
    """
    try:
        found: str | None = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # damaged metadata is reported differently by each Python version
        return "unknown"
    return found or "unknown"


def versions_of(*distributions: str) -> tuple[tuple[str, str], ...]:
    """(name, version) of those of `distributions` that are installed, in the order given."""
    found = ((name, version_of(name)) for name in distributions)
    return tuple((name, version) for name, version in found if version is not None)


def import_failure(module: str) -> str:
    """Import `module`; "" when that works, otherwise the exception in one line."""
    _, failure = attempt(lambda: import_module(module), None)
    return failure


def is_findable(module: str) -> bool:
    """Whether a top-level `module` could be imported, without importing it."""
    # find_spec raises on a module that was loaded without a spec; that one is there.
    return attempt(lambda: find_spec(module) is not None, True)[0]


@lru_cache(maxsize=256)
def has_parameter(function: Callable[..., object], name: str) -> bool:
    """Whether `function` has a parameter of that name: libraries gain them from one version to the next."""
    return name in inspect.signature(function).parameters


def line_of(path: Path, start: str = "") -> str:
    """The first line of a text file that begins with `start`; "unknown" where there is none."""
    text, _ = attempt(lambda: path.read_text(encoding="utf-8", errors="replace"), "")
    return next((" ".join(line.split()) for line in text.splitlines() if line.startswith(start)), "unknown")


def torch_build() -> str:
    """This PyTorch as reasons name it: "PyTorch 2.13.0+cpu"."""
    return f"PyTorch {torch.__version__}"


def torch_cuda_obstacle() -> tuple[str, str] | None:
    """(reason, remedy) why `torch.cuda` cannot serve this process, whatever the hardware; None if it can.

    PyTorch's device extensions (entry-point group `torch.backends`) may put their own functions there, which then
    answer for another vendor's devices. A fork is no obstacle here: see `fork_obstacle`.
    """
    package = (getattr(torch.cuda.device_count, "__module__", None) or "torch").partition(".")[0]
    if package in {point.name for point in metadata.entry_points(group="torch.backends")}:
        return f"torch.cuda is redirected to {package}", f"do not load what makes {package} stand in for CUDA"
    return None


def fork_obstacle(runtime: object, name: str) -> tuple[str, str] | None:
    """(reason, remedy) if this process was forked after `runtime`, a module like `torch.cuda`, was initialised.

    For `DeviceKind.detect`, which says it only where there is a device: PyTorch marks each later fork as bad also where
    the runtime was only asked for the number of devices, as `torch.cuda.is_available()` does, and answered that there
    is none.
    """
    in_bad_fork = getattr(runtime, "_is_in_bad_fork", None)
    if in_bad_fork is None or not in_bad_fork():
        return None
    return (
        f"this process was forked after its parent had initialised {name}",
        "start worker processes with the multiprocessing start method 'spawn' or 'forkserver'",
    )


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One vendor's devices, and what shows them outside PyTorch: tells why PyTorch counts none.

    Attributes:
        noun: what one is called, in the singular.
        nodes: glob patterns of the device files in `folder`.
        visibility: environment variables that hide devices.
        check: the vendor's command that lists devices, and what to look for.
        folder: where device files are.
        unset_when_empty: those of `visibility` that count as not set where they are empty; an empty one of the rest
            hides every device.
    """

    noun: str
    nodes: tuple[str, ...]
    visibility: tuple[str, ...]
    check: str
    folder: Path = Path("/dev")
    unset_when_empty: tuple[str, ...] = ()

    def detect(
        self,
        library: str,
        count: Callable[[], int],
        versions: tuple[tuple[str, str], ...],
        forked: tuple[str, str] | None = None,
    ) -> Detection:
        """Available where `count`, a function of `library`, counts any device; otherwise why it does not.

        `forked` is what `fork_obstacle` gave: the reason where there is a device. Where its files are in sight
        nothing is counted, for the runtime is then of no use in this process.
        """
        if forked and not self._hiding() and self._nodes():
            return Detection(False, *forked, versions)
        found, failure = attempt(count, 0)
        if failure:
            return Detection(False, f"{library} cannot count {self.noun}s: {failure}", self.check, versions)
        if found < 1:
            reason, remedy = self._absence(library)
            return Detection(False, reason, remedy, versions)
        if forked:
            return Detection(False, *forked, versions)
        return Detection(True, f"{found} {self.noun}{'s' * (found > 1)} through {library}", versions=versions)

    def _absence(self, library: str) -> tuple[str, str]:
        """(reason, remedy) after `library` counted no device."""
        set_here = self._visibility()
        if name := self._hiding():
            return f"{name}={set_here[name]!r} hides every {self.noun}", f"unset {name}"
        nodes = self._nodes()
        closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
        if closed:
            return (
                f"{library} sees no {self.noun}: no permission to open {closed[0]}",
                "add the user to the group that owns it (`ls -l` shows it), then log in again",
            )
        if nodes:
            return f"{library} sees no {self.noun}, though {nodes[0]} is here", "; ".join(
                [self.check, *(f"{name}={value!r} must name one that is here" for name, value in set_here.items())]
            )
        patterns = " or ".join(str(self.folder / pattern) for pattern in self.nodes)
        return (
            f"{library} sees no {self.noun}, and there is no {patterns}",
            f"run on a machine with one; a container needs the device files passed in. {self.check}",
        )

    def _visibility(self) -> dict[str, str]:
        found = {name: os.environ[name] for name in self.visibility if name in os.environ}
        return {name: value for name, value in found.items() if value or name not in self.unset_when_empty}

    def _hiding(self) -> str:
        """The variable that hides every device; "" where none does."""
        # The runtimes read the list up to the first entry that is no device: an empty or negative first hides all.
        hiding = (name for name, value in self._visibility().items() if not value.strip() or value.strip()[0] == "-")
        return next(hiding, "")

    def _nodes(self) -> list[Path]:
        return [node for pattern in self.nodes for node in sorted(self.folder.glob(pattern))]
