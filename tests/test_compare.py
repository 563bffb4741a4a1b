"""Runs compared by a paired bootstrap over their items."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import conditions
from experiments.compare import check_items, main, paired_difference
from experiments.conditions import Run, compared

ROOT = Path(__file__).parent.parent


def test_pairing_removes_what_the_items_share():
    """One run is better by 0.1 on every item, however the items differ."""
    hard = np.random.default_rng(0).uniform(size=50)
    a = {str(i): x + 0.1 for i, x in enumerate(hard)}
    b = {str(i): float(x) for i, x in enumerate(hard)}
    mean, low, high, n = paired_difference(a, b)
    assert (mean, low, high, n) == (pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1), 50)


def test_the_interval_is_that_of_the_resampled_difference():
    random = np.random.default_rng(1)
    a = {str(i): float(x) for i, x in enumerate(random.random(400) < 0.7)}
    b = {str(i): float(x) for i, x in enumerate(random.random(400) < 0.5)}
    differences = np.array([a[i] - b[i] for i in a])
    mean, low, high, _ = paired_difference(a, b)
    normal = 1.96 * differences.std(ddof=1) / 20
    assert mean == pytest.approx(differences.mean())
    assert (low, high) == (
        pytest.approx(mean - normal, abs=0.01),
        pytest.approx(mean + normal, abs=0.01),
    )


def test_other_items_are_refused():
    with pytest.raises(ValueError, match="share 1 items of 2 and 1"):
        paired_difference({"a": 1.0, "b": 0.0}, {"a": 1.0})


def record(step, *rewards):
    by_item = {str(i): reward for i, reward in enumerate(rewards)}
    mean = sum(rewards) / len(rewards)
    return {
        "step": step,
        "mean": mean,
        "low": 0.0,
        "high": 1.0,
        "n": len(rewards),
        "rewards": by_item,
    }


def write(workdir, *records, size=(4, 4)):
    workdir.mkdir()
    task = {"factory": "frozenlake", "options": {"size": size}}
    config = {"seed": 0, "task": task, "validation": {"every": 10, "num_items": 2, "seed": 0}}
    (workdir / "config.json").write_text(json.dumps(config))
    (workdir / "validation.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def compare(*workdirs):
    return subprocess.run(
        [sys.executable, "-m", "experiments.compare", *map(str, workdirs)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def test_runs_are_compared_at_their_best(tmp_path):
    write(tmp_path / "a", record(0, 0, 0), record(10, 1, 1), record(20, 0, 1))
    write(tmp_path / "b", record(0, 0, 0), record(10, 0, 0))
    done = compare(tmp_path / "a", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'a'}: 1.000 ")
    assert "at step 10" in lines[0]
    assert "at step 0" in lines[1]
    assert "+1.000 [+1.000, +1.000]" in lines[2]


def test_a_run_without_validation_is_refused(tmp_path):
    write(tmp_path / "a")
    done = compare(tmp_path / "a")
    assert done.returncode == 2
    assert "never validated" in done.stderr


def test_runs_on_other_boards_are_not_paired(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", size=(5, 5))
    with pytest.raises(ValueError, match=r"options.size: \[4, 4\] -> \[5, 5\]"):
        check_items(tmp_path / "a", tmp_path / "b")


def test_a_run_is_not_compared_with_itself(tmp_path, monkeypatch, capsys):
    write(tmp_path / "a", record(0, 0, 0))
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path / "a"), f"{tmp_path}/b/../a"])
    with pytest.raises(SystemExit):
        main()
    assert "given twice" in capsys.readouterr().err


def test_an_unfinished_run_is_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr(conditions, "ROOT", tmp_path)
    write(tmp_path / "rlds-0", record(0, 0, 0), record(20, 1, 1))
    with pytest.raises(ValueError, match=r"rlds-0 was validated up to step 20 of 30"):
        conditions.read("rlds", 0)


def test_a_dropped_board_is_named():
    with pytest.raises(ValueError, match=r"rlds: .* boards \['1'\]"):
        compared({"rlds": [record(10, 1, 0), record(10, 1)]})


def test_budgets_bound_the_steps_and_the_tokens():
    scalars = {"engine/decode_tokens": {1: 10.0, 2: 10.0, 3: 10.0}}
    run = Run(0, [record(0, 0.1), record(2, 0.5), record(3, 0.9)], scalars)
    assert [run.best(steps=s)["step"] for s in (0, 2, 3)] == [0, 2, 3]
    assert [run.best(tokens=t)["step"] for t in (9, 20, 29, 30)] == [0, 2, 2, 3]


def test_conditions_are_averaged_over_seeds_before_boards_are_resampled():
    found = {
        "rlds": [record(10, 1, 0), record(20, 1, 1)],
        "rlvr": [record(10, 0, 0), record(10, 1, 0)],
    }
    outcome = compared(found)
    assert outcome["rlds"]["seeds"] == [0.5, 1.0]
    assert outcome["rlds"]["reward"]["mean"] == 0.75
    assert outcome["rlds"]["difference"]["mean"] == 0.5
    assert outcome["rlvr"]["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 2}
