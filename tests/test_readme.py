"""The figures of README and of the task pages are those of experiments/results."""

import json

import pytest

from experiments.record import RESULTS
from experiments.report import PAGES, render


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_up_to_date(page):
    assert render(page) == page.read_text(), "run `python -m experiments.report`"


@pytest.mark.parametrize("name", [name for sections in PAGES.values() for name in sections])
def test_a_result_says_how_it_was_made(name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    assert record["command"].startswith("python -m experiments.")
    assert {"jax", "jaxlib", "numpy"} <= record["versions"].keys()
    assert record["machine"]
