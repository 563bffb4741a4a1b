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

# Red for tokens to make less likely, blue for more. Pale enough at both ends to read text on, and
# steep around 0, so that a small advantage beside a large one still has a sign.
CREDIT: Colormap = LinearSegmentedColormap.from_list(
    "credit",
    [
        (0.0, "#d6604d"),
        (0.22, "#f4a582"),
        (0.42, "#fbd9c6"),
        (0.5, "#fafafa"),
        (0.58, "#d0e4f0"),
        (0.78, "#92c5de"),
        (1.0, "#4393c3"),
    ],
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
