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


BAD = [b"{broken}\n", b"123\n", b'{"a": 1}\n', b'{"step": "1"}\n', b"\xff\n"]


@pytest.mark.parametrize("bad", BAD)
def test_a_damaged_line_costs_itself_alone(bad, tmp_path, caplog):
    path = tmp_path / "validation.jsonl"
    lines = [b'{"step": %d}\n' % step for step in range(5)]
    path.write_bytes(b"".join([*lines[:2], bad, *lines[2:], b'{"st']))
    run_files.drop_after(path, 3)
    assert path.read_bytes() == b"".join(lines[:4])
    assert "1 damaged lines are dropped: [3]" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["validation.jsonl"]


def test_later_records_and_half_a_line_are_cut_without_a_warning(tmp_path, caplog):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    run_files.drop_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert not caplog.text


@pytest.mark.parametrize("bad", BAD)
def test_readers_name_file_and_line(bad, tmp_path):
    (tmp_path / "validation.jsonl").write_bytes(b'{"step": 1}\n' + bad)
    with pytest.raises(ValueError, match=r"validation\.jsonl:2 is damaged"):
        run_files.validations(tmp_path)


def test_readers_name_what_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"validation\.jsonl does not exist; give"):
        run_files.validations(tmp_path)


def test_a_config_without_fields_is_damaged(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        run_files.config(tmp_path)
