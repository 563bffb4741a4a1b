"""README's figures are those of experiments/results."""

import json

import pytest

from experiments.record import RESULTS
from experiments.report import README, SECTIONS, render


def test_tables_are_up_to_date():
    text = README.read_text()
    assert render(text) == text, "run `python -m experiments.report`"


@pytest.mark.parametrize("name", SECTIONS)
def test_a_result_says_how_it_was_made(name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    assert record["command"].startswith("python -m experiments.")
    assert {"jax", "jaxlib", "numpy"} <= record["versions"].keys()
    assert record["machine"]
