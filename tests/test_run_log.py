"""The run log, read back with TensorBoard's own reader."""

import json

import pytest
from ml_collections import ConfigDict
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlds_jax.run_log import RunLog

CONFIG = ConfigDict({"steps": 2})


def test_scalars_are_read_back_from_the_event_file(tmp_path):
    log = RunLog(tmp_path, CONFIG)
    for step in (0, 1):
        log.scalars(step, {"critic/rewards/mean": 0.25 * (step + 1), "timing_s/gen": 3.0})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"critic/rewards/mean", "timing_s/gen"}
    rewards = events.Scalars("critic/rewards/mean")
    assert [(e.step, e.value) for e in rewards] == [(0, 0.25), (1, 0.5)]


def test_a_metric_that_is_not_finite_is_named(tmp_path):
    log = RunLog(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="actor/pg_loss"):
        log.scalars(0, {"actor/pg_loss": float("nan"), "timing_s/gen": 1.0})
    log.close()


def test_rollouts_are_json_lines(tmp_path):
    log = RunLog(tmp_path, CONFIG)
    log.rollouts(4, [{"uid": "a", "reward": 1.0}, {"uid": "b", "reward": 0.0}])
    log.close()
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 4, "uid": "a", "reward": 1.0},
        {"step": 4, "uid": "b", "reward": 0.0},
    ]


def test_a_resumed_log_holds_nothing_twice(tmp_path):
    """Steps 1 to 3, a half-written line, and again from the checkpoint of step 1."""
    log = RunLog(tmp_path, CONFIG)
    for step in (1, 2, 3):
        log.rollouts(step, [{"uid": "a"}])
        log.scalars(step, {"critic/rewards/mean": float(step)})
    log.close()
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 1, "uid"')
    log = RunLog(tmp_path, CONFIG, restored=1)
    log.rollouts(2, [{"uid": "b"}])
    log.scalars(2, {"critic/rewards/mean": -2.0})
    log.close()
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records == [{"step": 1, "uid": "a"}, {"step": 2, "uid": "b"}]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rewards = events.Scalars("critic/rewards/mean")
    assert [(e.step, e.value) for e in rewards] == [(1, 1.0), (2, -2.0)]


def test_without_a_checkpoint_everything_is_dropped(tmp_path):
    for _ in range(2):
        log = RunLog(tmp_path, CONFIG)
        log.rollouts(1, [{"uid": "a"}])
        log.scalars(1, {"critic/rewards/mean": 1.0})
        log.close()
    assert (tmp_path / "rollouts.jsonl").read_text().count("\n") == 1
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("critic/rewards/mean")) == 1
