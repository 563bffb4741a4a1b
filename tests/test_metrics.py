"""The run log, read back with TensorBoard's own reader."""

import json

import pytest
from ml_collections import ConfigDict
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlds_jax.metrics import RunLog, train_flops
from rlds_jax.models.config import ModelConfig

CONFIG = ConfigDict({"steps": 2})
SMALL = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    rope_theta=1e4,
    tie_embeddings=True,
)


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


def test_a_workdir_holds_one_run_and_its_config(tmp_path):
    RunLog(tmp_path, CONFIG).close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"steps": 2}
    with pytest.raises(ValueError, match="already holds a run"):
        RunLog(tmp_path, CONFIG)


def test_train_flops_by_hand():
    # Per layer: q and o 2*8*8, k and v 2*8*4, three feed-forward matrices 3*8*12; head 8*11.
    weights = 3 * (2 * 64 + 2 * 32 + 288) + 88
    # Attention: 2 products * 2 FLOPs * 8 wide * T^2 / 2, times 3 passes, times 3 layers.
    attention = 3 * 3 * 2 * 2 * 8 * (5 * 5 + 2 * 2) / 2
    assert train_flops(SMALL, [5, 2]) == 6 * weights * 7 + attention
