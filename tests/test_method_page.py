"""The worked example of docs/method.md, computed."""

import re
from pathlib import Path

import numpy as np
import pytest

from rlds_jax import sdae

PAGE = (Path(__file__).parent.parent / "docs" / "method.md").read_text()


def row(name):
    """The numbers of the page's table row that starts with `name`."""
    (cells,) = re.findall(rf"^\| {re.escape(name)}[^|]*\|(.*)\|$", PAGE, re.MULTILINE)
    return [float(cell) for cell in cells.split("|")]


@pytest.fixture(scope="module")
def output():
    grades = [row("grades of rollout a"), row("grades of rollout b")]
    return sdae.advantages(
        np.ones(2, np.float32),
        np.array(grades, np.float32),
        np.array([[0, 2], [0, 2]], np.int32),
        np.array([[0.6, 0.4]] * 2, np.float32),
        np.zeros(2, np.int32),
        np.tile(np.repeat(np.arange(3, dtype=np.int32), 4), (2, 1)),
        np.zeros(2, np.int32),
        num_groups=1,
    )


@pytest.mark.parametrize("i", [0, 1])
def test_the_example_is_what_the_kernels_compute(i, output):
    name = "ab"[i]
    assert row(f"shares of {name}") == pytest.approx(output.share[i].tolist(), abs=1e-6)
    assert row(f"A_k of {name}") == pytest.approx(output.subtask[i].tolist(), abs=1e-6)
    *turns, mean = row(f"rollout {name}")
    assert turns == pytest.approx(output.token[i, ::4].tolist(), abs=5e-4)
    assert mean == pytest.approx(float(output.row[i]), abs=5e-4)
    assert np.mean(output.token[i]) == pytest.approx(float(output.row[i]), abs=1e-5)


def test_grpo_sees_no_difference(output):
    np.testing.assert_array_equal(output.grpo, 0)
    assert f"standard deviation is {float(output.sigma_batch):.4f}" in PAGE
