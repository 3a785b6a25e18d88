"""What every picture of a measurement shares: matplotlib where it is installed, one look, one way to write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any

from hal_attn.errors import HalAttnError

# Apart in hue and in lightness, so that they stay apart in grey and for most colour-blind eyes (Okabe and Ito).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A400", "#7F7F7F", "#1B1B1B")
OURS, BARE, PEER, WRONG, INK = "#0072B2", "#A0AEC0", "#E69F00", "#C53030", "#1A202C"


class MissingPlotLibraryError(HalAttnError, ImportError):
    """matplotlib is missing or broken; the message has the command that installs it."""


def require_matplotlib() -> Any:
    """`matplotlib.figure`.

    Raises:
        MissingPlotLibraryError: it is not installed, or fails to import.
    """
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingPlotLibraryError(
            f'--plot needs matplotlib ({error}); install it with: pip install "hal-attn[bench]"'
        ) from error


def new_figure(width: float, height: float, title: str, facts: str) -> Any:
    """A figure with what it shows above, and where it was measured below that, in inches."""
    figure = require_matplotlib().Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}\n{fill(facts, int(width * 13))}", fontsize=11, color=INK)
    return figure


def plain(axes: Any, grid: str) -> None:
    """Axes without a frame, with a light grid along `grid`, "x" or "y", behind what is drawn."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color="#E2E8F0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)


def label(axes: Any, bars: Any, texts: Sequence[str]) -> None:
    """Texts at the ends of bars, readable over lines."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    axes.bar_label(bars, texts, padding=4, fontsize=9, bbox=box, zorder=5)


def legend(figure: Any, colours: Mapping[str, str]) -> None:
    """What colours mean, below everything."""
    rectangle = import_module("matplotlib.patches").Rectangle
    handles = [rectangle((0, 0), 1, 1, color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(colours), fontsize=9, frameon=False)


def save(figure: Any, path: Path) -> None:
    """Write it as PNG."""
    figure.savefig(path, format="png", dpi=110)
