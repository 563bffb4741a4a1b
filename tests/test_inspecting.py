"""docs/inspecting.md tells of every field that a run writes."""

import json
import re
from pathlib import Path

from rlds_jax import run_files, summary

DOCS = (Path(__file__).parent.parent / "docs" / "inspecting.md").read_text()
NAMED = set(re.findall(r"`(\w+)`", DOCS))


def test_every_field_of_a_rollout_is_explained(tiny_run):
    fields = {field for record in run_files.rollouts(tiny_run) for field in record}
    assert "reflector" in fields
    assert not fields - NAMED


def test_every_field_of_a_validation_and_of_the_summary_is_named(tiny_run):
    records = run_files.validations(tiny_run)
    written = summary.write(tiny_run)
    assert json.loads((tiny_run / "summary.json").read_text()) == written
    assert not {field for record in records for field in record} - NAMED
    assert not written.keys() - NAMED
