"""The curves of a run are those it logged."""

import matplotlib.image
import numpy as np
import pytest

from experiments.figures import curves
from experiments.figures.__main__ import main
from rlds_jax import run_files


def test_panels_hold_what_the_run_logged(tiny_run):
    panels = {panel.title: panel.curves for panel in curves.prepare(tiny_run)}
    validations = run_files.validations(tiny_run)
    (validation,) = panels["Validation reward, 95% interval"]
    assert validation.steps == [0, 2]
    assert validation.values == [v["mean"] for v in validations]
    assert list(validation.low) == [v["low"] for v in validations]
    assert list(validation.high) == [v["high"] for v in validations]
    scalars = run_files.scalars(tiny_run)
    for title, names in curves.PANELS.items():
        drawn = {curve.label: curve for curve in panels[title]}
        for label, name in names.items():
            logged = scalars.get(name, {})
            assert (drawn[label].steps if logged else []) == sorted(logged), name
            assert [logged[s] for s in sorted(logged)] == (drawn[label].values if logged else [])
    rates = [panel.title for panel in curves.prepare(tiny_run) if panel.rates]
    assert [title.split()[0] for title in rates] == ["Success", "Judges:", "Groups"]
    (kl,) = panels["KL to the reference"]
    assert kl.steps == [1, 2]


def test_lines_are_the_curves():
    panels = [
        curves.Panel("Validation", [curves.Curve("", [0, 4], [0.2, 0.4], [0.1, 0.3], [0.3, 0.5])]),
        curves.Panel("KL", []),
    ]
    first, second = curves.draw(panels).axes
    (line,) = first.lines
    np.testing.assert_allclose(line.get_xydata(), [[0, 0.2], [4, 0.4]])
    band = first.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0.1, 0.5)
    assert [text.get_text() for text in second.texts] == ["not logged"]


def test_smoothing_keeps_a_constant_and_averages_neighbours():
    np.testing.assert_array_equal(curves.smooth(np.ones(40)), np.ones(40))
    smoothed = curves.smooth(np.arange(40.0) % 2)
    assert smoothed[10] == pytest.approx(2 / 5)  # of 0, 1, 0, 1, 0
    assert smoothed[0] == pytest.approx(1 / 3)  # of 0, 1, 0
    np.testing.assert_array_equal(curves.smooth(np.array([1.0, 5.0])), [1, 5])


def test_the_figure_of_a_run(tiny_run, tmp_path):
    main(["curves", f"--workdir={tiny_run}", f"--out={tmp_path / 'curves.png'}"])
    assert matplotlib.image.imread(tmp_path / "curves.png").std() > 0.02
