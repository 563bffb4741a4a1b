"""Saved policies, evaluated and exported from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs import frozenlake
from rlds_jax import saved
from rlds_jax.models import weights
from rlds_jax.trainer import Trainer

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A workdir of two steps, validated before and after each."""
    config = frozenlake.get_config("tiny")
    config.prompts_per_step, config.steps = 2, 2
    config.validation.every, config.validation.num_items = 1, 12
    config.batch.max_micro = 16
    workdir = tmp_path_factory.mktemp("saved") / "run"
    trainer = Trainer(config, workdir)
    trainer.run()
    trainer.close()
    return workdir


def command(module, *flags):
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, flags)], capture_output=True, text=True, cwd=ROOT
    )


def validations(workdir):
    return [json.loads(line) for line in (workdir / "validation.jsonl").open()]


@pytest.mark.parametrize("which", ["best", "last"])
def test_evaluating_a_run_gives_what_its_validation_gave(which, run, tmp_path):
    records = validations(run)
    expected = records[-1] if which == "last" else max(records, key=lambda r: r["mean"])
    out = tmp_path / "result.json"
    done = command("rlds_jax.evaluate", f"--workdir={run}", f"--step={which}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert f"after step {expected['step']}: reward {expected['mean']:.3f}" in done.stdout
    assert json.loads(out.read_text()) == {"policy": str(run), **expected}


def test_an_exported_policy_is_loaded_by_transformers_and_scores_the_same(run, tmp_path):
    out = tmp_path / "hf"
    flags = [f"--workdir={run}", "--step=2", f"--out={out}", "--dtype=float32"]
    done = command("rlds_jax.export", *flags)
    assert done.returncode == 0, done.stderr
    assert "after step 2" in done.stdout
    AutoTokenizer.from_pretrained(out)
    AutoModelForCausalLM.from_pretrained(out)
    _, params = weights.load(out)
    step, _, _, expected = saved.policy(run, "last")
    assert step == 2
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    done = command(
        "rlds_jax.evaluate",
        f"--model={out}",
        "--config=configs/frozenlake.py:tiny",
        "--config.validation.num_items=12",
    )
    assert f"{out}: reward {validations(run)[-1]['mean']:.3f}" in done.stdout, done.stderr
    again = command("rlds_jax.export", *flags)
    assert again.returncode == 2
    assert "not an empty directory" in again.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workdir={run}", "--step=7"], "no checkpoint of step 7"),
        (["--workdir={run}", "--step=newest"], "use best, last or a number"),
        (["--workdir={run}", "--model=x"], "give --workdir alone"),
        (["--model=rlds_jax/models/tiny"], "give --workdir alone"),
        (["--workdir={run}/nothing"], "config.json does not exist"),
        (["--model=/nowhere", "--config=configs/frozenlake.py:tiny"], "/nowhere"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(flags, message, run):
    done = command("rlds_jax.evaluate", *(flag.format(run=run) for flag in flags))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
