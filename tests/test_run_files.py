"""A run's files, read back."""

import json

import pytest

from rlds_jax import run_files
from rlds_jax.events import Events


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_scalars_by_name_and_step_the_last_of_a_step_run_again(tmp_path):
    events = Events(tmp_path / "tensorboard")
    for step, value in ((1, 0.5), (2, 0.25), (2, 0.75)):
        events.scalars(step, {"a": value, "b": 1.0})
    events.close()
    assert run_files.scalars(tmp_path) == {"a": {1: 0.5, 2: 0.75}, "b": {1: 1.0, 2: 1.0}}


def test_no_event_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no event file"):
        run_files.scalars(tmp_path)


def test_validations_ascend_and_a_later_line_counts(tmp_path):
    lines = [{"step": 10, "mean": 0.1}, {"step": 0, "mean": 0.2}, {"step": 10, "mean": 0.3}]
    write_lines(tmp_path / "validation.jsonl", lines)
    assert run_files.validations(tmp_path) == [lines[1], lines[2]]


def test_rollouts_of_one_step_or_of_all_a_later_line_counts(tmp_path):
    lines = [{"step": 1, "uid": "a"}, {"step": 2, "uid": "b"}, {"step": 2, "uid": "b", "reward": 1}]
    write_lines(tmp_path / "rollouts.jsonl", lines)
    assert run_files.rollouts(tmp_path, 2) == [lines[2]]
    assert run_files.rollouts(tmp_path) == [lines[0], lines[2]]
    with pytest.raises(ValueError, match="no rollouts of step 3"):
        run_files.rollouts(tmp_path, 3)


def test_a_line_still_being_written_is_left_out(tmp_path):
    whole = '{"step": 1, "uid": "a"}\n'
    (tmp_path / "rollouts.jsonl").write_text(whole + '{"step": 1, "ui')
    assert run_files.rollouts(tmp_path) == [{"step": 1, "uid": "a"}]
