"""The summary of a run: by hand from its logs, and of a real one."""

import json
import sys

import pytest
from ml_collections import ConfigDict

from rlds_jax import run_files, summary
from rlds_jax.run_log import RunLog
from rlds_jax.validation import Interval, Validation

STEPS = [
    {"perf/time_per_step": 90.0, "timing_s/gen": 50.0, "grader/parse_rate": 0.5},
    {"perf/time_per_step": 2.0, "timing_s/gen": 1.0, "grader/parse_rate": 1.0},
    {"perf/time_per_step": 4.0, "timing_s/gen": 2.0, "timing_s/retry": 0.5},
]
COUNTS = [
    {"rollout/count": 8, "response_length/sampled": 10, "retry/count": 0},
    {"rollout/count": 8, "response_length/sampled": 20, "retry/count": 2, "retry/gen_ratio": 0.5},
    {"rollout/count": 8, "response_length/sampled": 30, "retry/count": 3, "retry/gen_ratio": 2.0},
]


def logged(workdir, validations):
    """A run of three steps, validated with these means."""
    log = RunLog(workdir, ConfigDict({"steps": 3}))
    for step, metrics in enumerate(STEPS, 1):
        log.scalars(step, metrics | COUNTS[step - 1])
    for step, mean in validations.items():
        reward = Interval(mean, mean - 0.1, mean + 0.1, 50)
        outcome = Validation({}, reward, mean, 2.0, 0)
        log.validation(step, "game", outcome, {"timing_s/validation": 7.0})
    log.close()
    return workdir


def test_validation_before_after_and_best(tmp_path):
    written = summary.write(logged(tmp_path, {0: 0.25, 2: 0.75, 3: 0.5}))
    assert written == json.loads((tmp_path / "summary.json").read_text())
    before = {"step": 0, "mean": 0.25, "low": 0.15, "high": 0.35, "n": 50}
    assert written["val_before"] == before
    assert (written["val_after"]["step"], written["val_after"]["mean"]) == (3, 0.5)
    assert (written["best"]["step"], written["best"]["mean"]) == (2, 0.75)
    assert written["best_step"] == 2


def test_times_leave_out_the_first_step_and_validation(tmp_path):
    written = summary.write(logged(tmp_path, {0: 0.25}))
    assert written["step_seconds"] == {"step": 3.0, "gen": 1.5, "retry": 0.5}
    assert written["steps"] == 3


def test_rates_are_means_over_the_steps_that_have_them(tmp_path):
    written = summary.write(logged(tmp_path, {}))
    assert written["grader_parse_rate"] == 0.75
    assert written["fallback_group_rate"] is None


def test_sampled_tokens_are_means_over_all_steps(tmp_path):
    written = summary.write(logged(tmp_path, {}))
    retried = (2 * 20 * 0.5 + 3 * 30 * 2.0) / 3
    assert written["sampled_tokens"] == {"gen": 160.0, "retry": pytest.approx(retried, abs=0.1)}


def test_without_validation_its_entries_are_null(tmp_path):
    written = summary.write(logged(tmp_path, {}))
    assert all(written[key] is None for key in ("val_before", "val_after", "best", "best_step"))
    shown = summary.text(written, tmp_path / "run")
    assert "\nvalidation" not in shown
    assert "rlds_jax.export" not in shown


def test_the_text_has_intervals_places_and_commands(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/elsewhere/bin/python")
    workdir = logged(tmp_path / "my run", {0: 0.25, 3: 0.5})
    lines = summary.text(summary.write(workdir), workdir).splitlines()
    assert lines[0].endswith(f"are in {workdir}")
    assert "validation before: reward 0.250 [0.150, 0.350], n = 50, step 0" in lines
    assert "validation  after: reward 0.500 [0.400, 0.600], n = 50, step 3" in lines
    assert not any("validation   best" in line for line in lines)  # it is the last
    assert "seconds a step (phases overlap): step 3.00, gen 1.50, retry 0.50" in lines
    commands = [line.partition(" -m ") for line in lines[lines.index("next:") + 1 :]]
    assert {python.strip() for python, _, _ in commands} == {"/elsewhere/bin/python"}
    assert [rest for _, _, rest in commands] == [
        f"tensorboard.main --logdir='{workdir}'/tensorboard",
        f"experiments.figures credit --workdir='{workdir}' --step=3",
        f"experiments.figures curves --workdir='{workdir}'",
        f"rlds_jax.export --workdir='{workdir}' --step=best --out='{workdir}'/hf",
    ]


def test_commands_name_an_interpreter_below_the_directory_shortly(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    workdir = logged(tmp_path / "run", {0: 0.25})
    text = summary.text(summary.write(workdir), workdir)
    assert "  .venv/bin/python -m tensorboard.main --logdir=" in text


def test_the_text_names_the_best_where_it_is_another(tmp_path):
    workdir = logged(tmp_path, {0: 0.25, 2: 0.75, 3: 0.5})
    lines = summary.text(summary.write(workdir), workdir).splitlines()
    assert "validation   best: reward 0.750 [0.650, 0.850], n = 50, step 2" in lines
    assert "grader parse rate 75.0%" in lines


def test_the_summary_of_a_real_run(tiny_run):
    written = summary.write(tiny_run)
    first, last = run_files.validations(tiny_run)
    for key, record in (("val_before", first), ("val_after", last)):
        assert written[key] == {k: record[k] for k in ("step", "mean", "low", "high", "n")}
    assert written["step_seconds"].keys() >= {"step", "gen", "grade", "update", "sync"}
    records = run_files.rollouts(tiny_run)
    for phase, rows in (
        ("gen", [r for r in records if r["parent"] is None]),
        ("retry", [r for r in records if r["parent"] is not None]),
    ):
        sampled = sum(r["sampled_tokens"] for r in rows) / 2
        assert written["sampled_tokens"][phase] == pytest.approx(sampled, abs=0.1), phase
    assert 0 <= written["fallback_group_rate"] <= 1
    assert 0 <= written["grader_parse_rate"] <= 1


def test_steps_that_tensorboard_lost_are_counted(tmp_path):
    workdir = logged(tmp_path, {0: 0.75, 4: 0.5})
    (workdir / "checkpoints" / "5").mkdir(parents=True)
    written = summary.write(workdir)
    assert (written["steps"], written["steps_unlogged"]) == (5, 2)
    lines = summary.text(written, workdir).splitlines()
    assert "TensorBoard lacks 2 of them, and so do the means" in lines
    assert any(line.endswith("--step=5") for line in lines)


def test_the_untrained_policy_can_be_the_best_and_exported(tmp_path):
    workdir = logged(tmp_path, {0: 0.75, 3: 0.5})
    assert "rlds_jax.export" in summary.text(summary.write(workdir), workdir)
