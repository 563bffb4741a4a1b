"""Draws rollouts on a grid of characters: a column per estimator, and the grades beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.figures.style import CREDIT, GREY, INK, PALE

POINTS = 7.0
FONT: dict[str, Any] = {"family": "DejaVu Sans Mono", "fontsize": POINTS, "color": INK}
CHARACTER = 0.602 * POINTS / 72  # inches; the font's advance is 0.602 em
LINE = 1.5 * POINTS / 72
GUTTER = 10  # turn number and advantage
TEXT = 62
TABLE = 44
GAP = 3
MASKED: dict[str, Any] = {
    "facecolor": "#f6f6f6",
    "edgecolor": "#d9d9d9",
    "hatch": "//////",
    "linewidth": 0,
}
MOST_LINES = 12  # of one turn; what is longer is cut


class Turn(NamedTuple):
    """One assistant turn.

    Attributes:
      tokens: their texts.
      grpo, sdae: the advantage of each of its tokens; sdae is None where the run computed none.
      masked: the retry mask takes it out of the loss.
      pivots: subtasks whose kernel is centred on it.
    """

    tokens: list[str]
    grpo: float
    sdae: float | None
    masked: bool
    pivots: list[str]


class Rollout(NamedTuple):
    """One rollout of the figure.

    Attributes:
      title: uid, reward and ending.
      turns: in order.
      grades: subtask, grade and pivot turn as the grader gave them; empty when ungraded.
      guidance: what a retry was told.
    """

    title: str
    turns: list[Turn]
    grades: list[tuple[str, int | None, int | None]]
    guidance: str | None


class Piece(NamedTuple):
    """A stretch of a token's text in the grid of its turn."""

    line: int
    column: int
    text: str


def draw(title: str, rollouts: Sequence[Rollout]) -> Figure:
    """The figure; patches carry the gid "rollout/estimator/turn", counted from 0."""
    columns = ["grpo"] + ["sdae"] * any(t.sdae is not None for r in rollouts for t in r.turns)
    norm = scale(rollouts)
    width = len(columns) * (GUTTER + TEXT + GAP) + TABLE
    height = 6.4 + sum(_height(rollout) for rollout in rollouts)
    figure = Figure(figsize=((width + 4) * CHARACTER, height * LINE))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-2, width + 2)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    _write(axes, 0, 0.9, title, weight="bold", fontsize=10)
    headings = {"grpo": "GRPO: one advantage per rollout", "sdae": "SDAE: by subtask and turn"}
    lefts = {name: i * (GUTTER + TEXT + GAP) for i, name in enumerate(columns)}
    for name, left in lefts.items():
        _write(axes, left, 2.4, headings[name], fontsize=9)
    top = 3.6
    for number, rollout in enumerate(rollouts):
        axes.plot([0, width], [top, top], color=PALE, linewidth=1)
        _write(axes, 0, top + 0.9, rollout.title, weight="bold")
        for name, left in lefts.items():
            _column(axes, f"{number}/{name}", left, top + 2, rollout.turns, norm)
        _beside(axes, width - TABLE, top + 2, rollout)
        top += _height(rollout)
    _legend(axes, norm, top)
    if "sdae" in columns:
        _write(axes, 110, top + 0.95, "▼ pivot of a subtask, as the grader named it")
    return figure


def scale(rollouts: Sequence[Rollout]) -> Normalize:
    """Symmetric around 0, the same for both estimators: the largest advantage in the loss."""
    turns = [turn for rollout in rollouts for turn in rollout.turns if not turn.masked]
    values = [abs(x) for turn in turns for x in (turn.grpo, turn.sdae) if x is not None]
    largest = max(values, default=0.0) or 1.0
    return Normalize(-largest, largest)


def wrap(tokens: Sequence[str], width: int = TEXT, most: int = MOST_LINES) -> list[Piece]:
    """Lays tokens out in lines; a newline is shown and starts one, a token breaks if it must.

    What does not fit `most` lines is replaced by its number of tokens.
    """
    pieces: list[Piece] = []
    line = column = 0
    for number, token in enumerate(tokens):
        for text in _breakable(token, width):
            if column + len(text) > width:
                line, column = line + 1, 0
            if line == most:
                return [*pieces, Piece(most, 0, f"... {len(tokens) - number} more tokens")]
            pieces.append(Piece(line, column, text))
            column += len(text)
            if text.endswith("↵"):
                line, column = line + 1, 0
    return pieces


def _breakable(token: str, width: int) -> Iterator[str]:
    """A token in pieces of at most `width` characters, newlines visible at their ends."""
    shown = token.replace("\n", "↵\n").replace("\t", "⇥").replace("\r", "")
    for part in shown.split("\n"):
        for start in range(0, len(part), width):
            yield part[start : start + width]


def _lines(turn: Turn) -> int:
    """Lines of a turn: its pivots, its text, and a little room."""
    pieces = wrap(turn.tokens)
    return bool(turn.pivots) + (pieces[-1].line + 1 if pieces else 1)


def _height(rollout: Rollout) -> float:
    text = sum(_lines(turn) + 0.3 for turn in rollout.turns)
    return 3.2 + max(text, len(_side_lines(rollout)))


def _column(
    axes: Axes, gid: str, left: float, top: float, turns: Sequence[Turn], norm: Normalize
) -> None:
    for number, turn in enumerate(turns):
        value = turn.grpo if gid.endswith("grpo") else turn.sdae
        first = top
        if turn.pivots:
            first += 1
            if gid.endswith("sdae"):
                names = ", ".join(turn.pivots)
                _write(axes, left + GUTTER, top + 0.5, f"▼ {names}", weight="bold", fontsize=6.5)
        _write(axes, left, first + 0.5, f"{number:>2}", color=GREY)
        if value is not None:
            colour = GREY if turn.masked else INK
            _write(axes, left + 3, first + 0.5, f"{value:+.2f}", color=colour)
            _tokens(axes, f"{gid}/{number}", left + GUTTER, first, turn, CREDIT(norm(value)))
        top += _lines(turn) + 0.3


def _tokens(axes: Axes, gid: str, left: float, top: float, turn: Turn, colour) -> None:
    for piece in wrap(turn.tokens):
        x, y = left + piece.column, top + piece.line
        patch = Rectangle((x, y + 0.04), len(piece.text), 0.92, linewidth=0.4, gid=gid)
        if turn.masked:
            patch.set(**MASKED)
        else:
            patch.set(facecolor=colour, edgecolor="white")
        axes.add_patch(patch)
        _write(axes, x, y + 0.5, piece.text, color=GREY if turn.masked else INK)


def _side_lines(rollout: Rollout) -> list[str]:
    """The grades, and what a retry was told."""
    lines = ["ungraded"]
    if rollout.grades:
        lines = [f"{'subtask':<25} {'grade':<7} pivot"]
        for name, grade, pivot in rollout.grades:
            squares = "missing" if grade is None else "■" * grade + "□" * (5 - grade)
            where = "-" if pivot is None else f"turn {pivot}"
            lines.append(f"{name[:25]:<25} {squares:<7} {where}")
    if rollout.guidance:
        told = textwrap.wrap(rollout.guidance, TABLE - 2, max_lines=8, placeholder=" ...")
        lines += ["", "guidance of the retry", *told]
    return lines


def _beside(axes: Axes, left: float, top: float, rollout: Rollout) -> None:
    for number, line in enumerate(_side_lines(rollout)):
        heading = line.startswith(("subtask ", "guidance of", "ungraded"))
        _write(axes, left, top + number + 0.5, line, color=GREY if heading else INK)


def _legend(axes: Axes, norm: Normalize, top: float) -> None:
    bar = axes.inset_axes((0, top + 0.6, 40, 0.7), transform=axes.transData)
    mappable = ScalarMappable(norm, CREDIT)
    axes.figure.colorbar(mappable, cax=bar, orientation="horizontal")
    bar.tick_params(labelsize=6.5, colors=INK, length=2)
    bar.spines[:].set_visible(False)
    _write(axes, 42, top + 0.95, "advantage of a token")
    axes.add_patch(Rectangle((68, top + 0.55), 5, 0.8, **MASKED))
    _write(axes, 74, top + 0.95, "not in the loss: the retry mask")


def _write(axes: Axes, x: float, y: float, text: str, **style) -> None:
    plain = text.replace("$", r"\$")  # matplotlib would read mathematics between two of them
    axes.text(x, y, plain, va="center_baseline", **(FONT | style))
