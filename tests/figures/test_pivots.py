"""Pivot turns and grade changes: counted by hand, and drawn."""

import matplotlib.image
import pytest
from record_doubles import record, retry

from experiments.figures import pivots
from experiments.figures.__main__ import main
from rlds_jax import run_files
from rlds_jax.tasks.frozenlake import SUBTASKS

RECORDS = [
    record("1-0/0", 3, pivots={"planning": 1, "tracking": None}),
    record("1-0/1", 2, pivots={"planning": 7, "tracking": 0}),
    record("1-0/2", 3, grades=None, pivots=None),
    retry("1-0/0r", "1-0/0", grades={"planning": 5, "tracking": 4}),
    retry("1-0/1r", "1-0/1", grades={"planning": 1, "tracking": 3}),
    retry("1-0/2r", "1-0/2", grades={"planning": 1, "tracking": 3}),
]


def test_pivots_and_grade_changes_are_counted():
    planning, tracking = pivots.prepare(RECORDS)
    assert planning == ("planning", [0, 5, 0], 0, [3, -1])
    assert tracking == ("tracking", [1, 0, 0], 4, [])  # the originals' grades are missing
    assert tracking.null_share == 0.8
    assert tracking.mean_delta is None
    assert (planning.mean_delta.mean, planning.mean_delta.n) == (1, 2)


def test_a_run_without_grades_is_refused():
    with pytest.raises(ValueError, match="no rollout is graded"):
        pivots.prepare([RECORDS[2]])


def test_bars_are_the_shares():
    figure = pivots.draw(pivots.prepare(RECORDS))
    planning, tracking, changes = figure.axes
    assert [bar.get_height() for bar in planning.patches] == [0, 1, 0]
    assert [bar.get_height() for bar in tracking.patches] == [1, 0, 0]
    assert planning.get_ylabel() == "planning"
    widths = [bar.get_width() for bar in changes.patches[: len(pivots.DELTAS)]]
    assert widths == [0, 0, 0, 0.5, 0, 0, 0, 0.5, 0]  # -1 and +3
    assert changes.patches[3].get_x() == -0.5
    notes = [text.get_text() for text in changes.texts]
    assert notes[0:2] == ["-1", "+3"]
    assert notes[2].startswith("mean +1.00")
    assert notes[3] == "no retries"


def test_the_figure_of_a_run(tiny_run):
    main(["pivots", f"--workdir={tiny_run}"])
    assert matplotlib.image.imread(tiny_run / "figures" / "pivots.png").std() > 0.05
    main(["pivots", f"--workdir={tiny_run}", "--step=2"])
    assert (tiny_run / "figures" / "pivots-2.png").exists()
    counted = pivots.prepare(run_files.rollouts(tiny_run))
    assert [subtask.name for subtask in counted] == [subtask.name for subtask in SUBTASKS]
