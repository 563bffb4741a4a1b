"""What the figures share: colours, quiet axes, and where a figure is written."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure

INK = "#222222"
GREY = "#8a8a8a"
PALE = "#ececec"
BLUE = "#2f6fad"
RED = "#c0504d"
GOLD = "#b8860b"

# Red for tokens to make less likely, blue for more; pale enough at both ends to read text on.
CREDIT: Colormap = LinearSegmentedColormap.from_list(
    "credit", ["#d6604d", "#f4a582", "#fbe3d6", "#fafafa", "#dbe9f3", "#92c5de", "#4393c3"]
)


def quiet(axes: Axes, title: str) -> None:
    """A plain frame: two spines, a left-aligned title, a light grid."""
    axes.set_title(title, loc="left", fontsize=10, color=INK, weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelcolor=INK, labelsize=8)
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: Figure, out: Path | None, workdir: Path, name: str) -> Path:
    """Writes a figure to `out`, by default to figures/<name>.png in the workdir."""
    path = out or workdir / "figures" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")
    return path
