"""The loop on the bundled policy: every stage real, two prompts a step."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from configs import frozenlake
from rlds_jax import batch as batching
from rlds_jax import run_files, update
from rlds_jax.batch import BatchError, BatchLayout
from rlds_jax.tasks.base import Item
from rlds_jax.tasks.frozenlake import SUBTASKS
from rlds_jax.trainer import NonfiniteUpdates, Trainer, step_items

ROOT = Path(__file__).parent.parent
TIMED = ("timing_s/", "perf/", "engine/", "retry/gen_time_ratio")


def tiny(arg="", **training):
    """The tiny config with two prompts per step."""
    config = frozenlake.get_config(f"tiny,{arg}")
    config.prompts_per_step = 2
    config.steps = 2
    config.batch.max_micro = 16
    config.validation.every = 0
    config.training.update(training)
    return config


@pytest.fixture
def start(tmp_path):
    """Makes trainers in the test's directory and closes them at its end."""
    made = []

    def make(config, name="run"):
        made.append(Trainer(config, tmp_path / name))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def untimed(metrics):
    return {name: x for name, x in metrics.items() if not name.startswith(TIMED)}


def copy(tree):
    return jax.tree.map(np.array, tree)


def test_a_step_is_a_slice_of_a_seeded_shuffle():
    items = [Item(str(i), {}) for i in range(10)]
    epochs = [[step_items(items, 3 * e + s, 3, seed=5) for s in (1, 2, 3)] for e in range(2)]
    for epoch in epochs:
        ids = [item.id for step in epoch for item in step]
        assert len(set(ids)) == 9  # the tenth is left out
    assert epochs[0] != epochs[1]
    assert epochs[0][1] == step_items(items, 2, 3, seed=5) != step_items(items, 2, 3, seed=6)


@pytest.mark.parametrize("per_step", [0, 11])
def test_a_step_larger_than_the_data_is_refused(per_step):
    with pytest.raises(ValueError, match="prompts_per_step"):
        step_items([Item("0", {})] * 10, 1, per_step, seed=0)


@pytest.mark.parametrize("field", ["seed", "steps"])
def test_a_negative_number_is_named(field, tmp_path):
    config = frozenlake.get_config("tiny")
    config[field] = -1
    with pytest.raises(ValueError, match=f"{field} is -1"):
        Trainer(config, tmp_path)


@pytest.mark.parametrize("condition", ["rlds", "base_reflection", "rlvr"])
def test_two_steps_from_the_command_line(condition, tmp_path):
    command = [sys.executable, "-m", "rlds_jax.train", f"--workdir={tmp_path}"]
    flags = [f"--config=configs/frozenlake.py:tiny,{condition}", "--config.steps=2"]
    flags += ["--config.prompts_per_step=4", "--config.validation.num_items=8"]
    flags += ["--config.profile_steps=2:2"] if condition == "rlvr" else []
    done = subprocess.run([*command, *flags], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    expected = ["critic/rewards/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm"]
    expected += ["timing_s/gen", "timing_s/update", "timing_s/sync", "engine/tokens_per_s"]
    expected += ["engine/idle_slots", "engine/prefix_hit_rate", "perf/throughput"]
    if condition != "rlvr":
        expected += ["timing_s/grade", "timing_s/reflect", "timing_s/retry", "retry/gen_ratio"]
    if condition == "rlds":
        expected += ["sdae/sigma_batch", "sdae/fallback_group_rate", "grader/parse_rate"]
        expected += [f"subtask/frozenlake/{s.name}/grade" for s in SUBTASKS]
    for tag in expected:
        assert len(scalars[tag]) == 2, tag
    assert max(scalars["rollout_corr/logprob_diff_max"]) < 1e-3
    validations = [json.loads(line) for line in (tmp_path / "validation.jsonl").open()]
    assert [v["step"] for v in validations] == [0, 2]
    assert scalars["val/frozenlake/reward/mean"] == pytest.approx([v["mean"] for v in validations])
    assert all(len(v["rewards"]) == 8 for v in validations)

    traces = [*(tmp_path / "tensorboard").glob("plugins/profile/*/*.xplane.pb")]
    assert len(traces) == (condition == "rlvr")

    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["val_after"]["mean"] == validations[1]["mean"]
    assert "validation  after: reward" in done.stdout
    assert f"-m tensorboard.main --logdir={tmp_path}/tensorboard" in done.stdout

    config = frozenlake.get_config(f"tiny,{condition}")
    records = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").open()]
    originals = [r for r in records if r["parent"] is None]
    assert len(originals) == 2 * 4 * config.rollout.group_size
    assert {r["step"] for r in records} == {1, 2}
    assert any(r["parent"] for r in records) == (condition != "rlvr")


def test_every_rollout_is_recorded_with_its_credit(tiny_run):
    records = {record["uid"]: record for record in run_files.rollouts(tiny_run)}
    for record in records.values():
        counts = [len(ids) for ids in record["turn_tokens"]]
        mean = np.average(record["turn_advantages"], weights=counts)
        assert mean == pytest.approx(record["advantage"], abs=1e-5), record["uid"]
        replayed = sum(counts[: record["retry_from"] or 0])
        assert sum(counts) == record["sampled_tokens"] + replayed
        if record["parent"]:
            original = records[record["parent"]]
            assert record["masked_turns"] == original["masked_turns"] == record["retry_from"]
    assert any(record["parent"] for record in records.values())


def test_each_step_shows_a_group_and_the_advantages_of_the_loss(tiny_run):
    events = EventAccumulator(str(tiny_run / "tensorboard"))
    events.Reload()
    for step in (1, 2):
        records = run_files.rollouts(tiny_run, step)
        sample = next(e for e in events.Tensors("rollouts/sample") if e.step == step)
        shown = sample.tensor_proto.string_val[0].decode()
        assert shown.startswith(f"# group {step}-")
        histogram = next(e for e in events.Tensors("sdae/token_advantage") if e.step == step)
        left, right, count = tensor_util.make_ndarray(histogram.tensor_proto).T
        kept = [
            x
            for r in records
            for turn, (x, ids) in enumerate(
                zip(r["turn_advantages"], r["turn_tokens"], strict=True)
            )
            for _ in ids
            if turn >= r["masked_turns"]
        ]
        assert count.sum() == len(kept)
        assert (left[0], right[-1]) == pytest.approx((min(kept), max(kept)), abs=1e-5)


def test_the_same_seed_gives_the_same_run(start):
    runs = [start(tiny(), name) for name in ("a", "b")]
    for step in (1, 2):
        first, second = (untimed(run.step(step)) for run in runs)
        assert first == second
    jax.tree.map(np.testing.assert_array_equal, *(copy(run.state.params) for run in runs))


def test_every_metric_is_finite_and_the_policy_moves(start):
    run = start(tiny())
    before = copy(run.state.params)
    metrics = run.step(1)
    assert all(math.isfinite(x) for x in metrics.values())
    shares = [metrics[f"subtask/frozenlake/{s.name}/share"] for s in SUBTASKS]
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, copy(run.state.params))
    assert max(jax.tree.leaves(moved)) > 0


def test_a_nonfinite_update_is_skipped_and_several_stop_the_run(start, tmp_path):
    run = start(tiny(max_nonfinite=2))
    run.reference = jax.tree.map(lambda x: x * np.nan, run.reference)
    before = copy(run.state.params)
    metrics = run.step(1)
    assert metrics["actor/update_nonfinite"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, copy(run.state.params))
    with pytest.raises(NonfiniteUpdates, match="nonfinite_batch_step2"):
        run.step(2)
    with np.load(tmp_path / "run" / "nonfinite_batch_step2.npz") as dumped:
        assert dumped["tokens"].shape == dumped["policy_weight"].shape
        assert dumped["policy_weight"].sum() == pytest.approx(1, abs=1e-4)


def test_epochs_and_minibatches_take_as_many_updates(start):
    run = start(tiny(epochs=2, minibatches=2))
    metrics = run.step(1)
    assert int(run.state.step) == 4
    assert metrics["actor/ratio_max"] != 1.0  # the later updates are off-policy


def test_retries_can_be_trained_without_their_guidance(start):
    first = start(tiny(), "guided").step(1)
    second = start(tiny(clean_retries=True), "clean").step(1)
    assert first["retry/count"] == second["retry/count"] > 0
    assert first["rollout_corr/logprob_diff_max"] < 1e-3 < second["rollout_corr/logprob_diff_max"]


def test_a_batch_that_moves_to_the_device_unasked_is_refused(start, monkeypatch):
    run = start(tiny())
    tokens, weight = np.arange(9, dtype=np.int32), np.ones(9, np.float32)
    batch = batching.pack([batching.nll_sequence(("a",), tokens, weight)], run.layout)
    assert run.optimise(1, [batch])["actor/update_empty"] == 0
    monkeypatch.setattr(update, "put_batch", lambda batch, mesh: batch)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        run.optimise(2, [batch])


class Unready:
    """Of an update that never ends: whoever waits for it fails."""

    def wait(self, *_, **__):
        raise AssertionError("the host waits inside the step")

    block_until_ready = __array__ = __float__ = __int__ = __bool__ = __index__ = wait
    __getattr__ = wait  # fields, so that a state and an outcome hold nothing to wait for either


def test_the_host_waits_for_no_update_before_all_are_dispatched(start, monkeypatch):
    run = start(tiny(epochs=2))
    tokens, weight = np.arange(9, dtype=np.int32), np.ones(9, np.float32)
    batch = batching.pack([batching.nll_sequence(("a",), tokens, weight)], run.layout)
    events = []

    def dispatch(state, reference, placed):
        events.append("update")
        return Unready(), Unready()

    def logged(outcome):
        events.append("log")
        return {"actor/update_nonfinite": 0.0}

    run._update, run._logprobs = dispatch, None
    monkeypatch.setattr(update, "metrics", logged)
    run.optimise(1, [batch, batch])
    assert events == ["update"] * 4 + ["log"] * 4


def test_rollouts_are_on_disk_when_the_update_fails(start, tmp_path):
    run = start(tiny())
    run.layout = BatchLayout(rows=1, row_length=run.layout.row_length, max_micro=1)
    with pytest.raises(BatchError, match="max_micro"):
        run.step(1)
    assert (tmp_path / "run" / "rollouts.jsonl").read_text().count("\n") > 0
