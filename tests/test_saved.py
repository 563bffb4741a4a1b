"""Saved policies, evaluated and exported from the command line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from absl.testing import flagsaver
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs import frozenlake
from rlds_jax import commands, evaluate, export, play, saved
from rlds_jax.models import weights
from rlds_jax.rollouts.group import AllRolloutsDropped
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


TINY = "--config=configs/frozenlake.py:tiny"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workdir=run", "--out=/nowhere/x.json"], "its directory does not exist"),
        (["--model=rlds_jax/models/tiny", TINY, "--step=3"], "a model has none"),
        (["--model=x", "--config=configs/sft.py"], "give that of a task"),
        (["--workdir="], "--workdir is empty"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message, capsys, monkeypatch):
    """As on the command line, without its process."""
    monkeypatch.setattr(sys, "argv", ["evaluate", *flags])
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as stop:
        commands.run(evaluate.main, required=())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_no_rollout_of_an_evaluation_is_an_error(monkeypatch):
    async def validate(*_):
        raise AllRolloutsDropped("the prompt is too long")

    engine = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(play, "make_context", lambda *_: SimpleNamespace(engine=engine))
    monkeypatch.setattr(evaluate, "validate", validate)
    with pytest.raises(ValueError, match="the prompt is too long"):
        evaluate.evaluate(frozenlake.get_config("tiny"), 0, ROOT, None, None)


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """Stands for a saved policy; what `weights.save` does is the test's."""
    monkeypatch.setattr(saved, "policy", lambda *_: (3, tmp_path, None, None))
    return tmp_path


def test_an_export_that_fails_leaves_nothing_and_can_be_repeated(policy, monkeypatch):
    def full(_params, _model, directory, *_args, **_options):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("no space left")

    monkeypatch.setattr(weights, "save", full)
    for _ in range(2):
        with pytest.raises(OSError, match="hf cannot be written: no space left"):
            export.export(policy, "best", policy / "out" / "hf", "float32")
        assert [*(policy / "out").iterdir()] == []
    monkeypatch.setattr(weights, "save", lambda _p, _m, directory, *_, **__: directory.mkdir())
    assert export.export(policy, "best", policy / "out" / "hf", "float32") == 3
    assert [path.name for path in (policy / "out").iterdir()] == ["hf"]


def test_an_export_stays_out_of_the_checkpoints(policy):
    with pytest.raises(ValueError, match="among the run's checkpoints"):
        export.export(policy, "best", policy / "checkpoints" / "hf", "float32")


def test_a_policy_is_read_onto_the_devices_that_are_here(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["mesh"]["fsdp"] = 64
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert saved.policy(tmp_path / "run", "last")[0] == 2


def test_a_run_that_saved_nothing_has_no_last(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no checkpoint yet"):
        saved.policy(tmp_path, "last")
