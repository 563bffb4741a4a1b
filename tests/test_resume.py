"""A run that is killed and goes on equals one that was not."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlds_jax import saved

ROOT = Path(__file__).parent.parent
TIMED = ("timing_s/", "perf/", "engine/", "retry/gen_time_ratio")
STEPS = 6
# 7 items of 2 a step: an epoch is three steps.
FLAGS = [
    "--config=configs/frozenlake.py:tiny",
    "--config.prompts_per_step=2",
    "--config.task.options.train_items=7",
    "--config.rollout.group_size=2",
    "--config.validation.num_items=6",
    "--config.validation.every=2",
    "--config.checkpoint.every=1",
    "--config.batch.max_micro=16",
]
LIMIT = 240  # seconds


def command(workdir, *flags, steps=STEPS):
    run = [sys.executable, "-m", "rlds_jax.train", f"--workdir={workdir}", *FLAGS]
    return [*run, f"--config.steps={steps}", *flags]


def finish(workdir, *flags, steps=STEPS):
    """Runs, or goes on, to the end; returns what it printed."""
    done = subprocess.run(
        command(workdir, *flags, steps=steps),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def stop_when(workdir, happened, number=signal.SIGKILL, *flags):
    """Starts a run and sends it a signal as soon as `happened(workdir)`; returns its exit code."""
    with (workdir.parent / f"{workdir.name}.log").open("a") as log:
        run = subprocess.Popen(command(workdir, *flags), cwd=ROOT, stdout=log, stderr=log)
        until = time.monotonic() + LIMIT
        while run.poll() is None and not happened(workdir) and time.monotonic() < until:
            time.sleep(0.002)
        run.send_signal(number)
        return run.wait(timeout=LIMIT)


def lines(path):
    return path.read_text().count("\n") if path.exists() else 0


def rollouts_of(step):
    """Rollouts of a step are being logged; its update comes next."""
    return lambda workdir: lines(workdir / "rollouts.jsonl") > 4 * (step - 1)


def checkpoint_of(step):
    return lambda workdir: (workdir / "checkpoints" / str(step)).exists()


def writing_checkpoint(step):
    return lambda workdir: any((workdir / "checkpoints").glob(f"{step}.*tmp*"))


def scalars(workdir):
    events = EventAccumulator(str(workdir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.startswith(TIMED)
    }


def optimizer_leaves(workdir):
    with ocp.StandardCheckpointer() as reader:
        tree = reader.restore((workdir / "checkpoints" / str(STEPS) / "optimizer").resolve())
    del tree["rng"]
    return jax.tree.leaves(tree)


def assert_equal_runs(workdir, expected):
    for name in ("rollouts.jsonl", "validation.jsonl"):
        assert (workdir / name).read_bytes() == (expected / name).read_bytes(), name
    assert scalars(workdir) == scalars(expected)
    (_, _, _, params), (_, _, _, wanted) = (saved.policy(w, "last") for w in (workdir, expected))
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    for leaf, other in zip(optimizer_leaves(workdir), optimizer_leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps without a stop."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    finish(workdir)
    return workdir


@pytest.mark.parametrize(
    "happened",
    [rollouts_of(3), writing_checkpoint(2), checkpoint_of(3), checkpoint_of(6)],
    ids=["in a step", "writing a checkpoint", "at the epoch's end", "at the last step"],
)
def test_killed_and_resumed_is_as_never_killed(happened, whole, tmp_path):
    workdir = tmp_path / "run"
    assert stop_when(workdir, happened) in (-signal.SIGKILL, 0)
    finish(workdir)
    assert_equal_runs(workdir, whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_and_says_how_to_go_on(number, code, whole, tmp_path):
    workdir = tmp_path / "run"
    flags = ["--config.checkpoint.every=0"]
    assert stop_when(workdir, rollouts_of(3), number, *flags) == code
    said = (tmp_path / "run.log").read_text()
    assert f"stopped by {number.name} after step" in said
    assert "Traceback" not in said
    kept = max(int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert kept >= 2
    assert f"goes on after step {kept}" in finish(workdir)
    assert_equal_runs(workdir, whole)


def test_a_finished_run_trains_no_more_and_a_longer_one_goes_on(whole, tmp_path):
    workdir = tmp_path / "run"
    finish(workdir, steps=3)
    before = (workdir / "rollouts.jsonl").read_bytes()
    assert "nothing is left to train" in finish(workdir, steps=3)
    assert (workdir / "rollouts.jsonl").read_bytes() == before
    finish(workdir)
    validations = [json.loads(line)["step"] for line in (workdir / "validation.jsonl").open()]
    assert validations == [0, 2, 3, 4, 6]
    assert (workdir / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()


def test_a_damaged_checkpoint_costs_its_steps_alone(whole, tmp_path):
    workdir = tmp_path / "run"
    assert stop_when(workdir, checkpoint_of(4)) in (-signal.SIGKILL, 0)
    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name.split(".")[0]))
    for path in newest.rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)
    finish(workdir)
    assert_equal_runs(workdir, whole)


@pytest.mark.parametrize("limit", [20_000, 400_000], ids=["logs", "checkpoint"])
def test_a_full_disk_is_one_error_and_the_run_goes_on_later(limit, whole, tmp_path):
    """A file size limit stands in for the disk: writes fail with an OSError all the same."""
    workdir = tmp_path / "run"
    finish(workdir, steps=1)
    limited = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, -1));"
        "sys.argv = sys.argv[1:]; runpy.run_module('rlds_jax.train', run_name='__main__')"
    )
    words = [sys.executable, "-c", limited, "train", *command(workdir)[3:]]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT)
    assert done.returncode == 2, done.stderr
    *before, error, remedy = done.stderr.splitlines()  # tensorstore's threads may print before
    assert error.startswith("error: ")
    assert remedy.startswith("Nothing that was saved is lost")
    assert not any(line.startswith("error: ") for line in before)
    finish(workdir)
    records = [json.loads(line) for line in (workdir / "rollouts.jsonl").open()]
    assert [r["uid"] for r in records] == [
        json.loads(line)["uid"] for line in (whole / "rollouts.jsonl").open()
    ]


@pytest.mark.slow
def test_twenty_random_kills_resume_equal(whole, tmp_path):
    """Kills fall anywhere from the start of a process to its end; progress is made in between."""
    workdir = tmp_path / "run"
    chance = random.Random(0)
    codes = []
    for _ in range(20):
        ends = time.monotonic() + chance.uniform(1.0, 9.0)
        codes.append(stop_when(workdir, lambda _, ends=ends: time.monotonic() > ends))
        if codes[-1] == 0:  # finished: kill another run from its start
            assert_equal_runs(workdir, whole)
            workdir = tmp_path / f"run{len(codes)}"
    assert codes.count(-signal.SIGKILL) >= 15
    finish(workdir)
    assert_equal_runs(workdir, whole)
