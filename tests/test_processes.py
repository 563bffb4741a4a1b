"""Two processes with jax.distributed: what they agree on, and the training command in both."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest

from rlds_jax import run_files, saved

SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
import jax, numpy as np
import batch_doubles as doubles
from rlds_jax import batch as batching, losses, processes, sharding, update
from rlds_jax.checkpoint import Checkpoints, abstract_like
from rlds_jax.models import qwen3

directory, fsdp, tensor = sys.argv[1], *map(int, sys.argv[2:])
processes.initialise(True)
assert jax.process_count() == 2 and jax.device_count() == 4
MODEL = dataclasses.replace(doubles.MODEL, num_heads=4, num_kv_heads=2, intermediate_size=32)
optimizer = update.OptimizerConfig(learning_rate=1e-2)
transform = update.make_optimizer(optimizer)
mesh = sharding.make_mesh(fsdp=fsdp, tensor=tensor)
layout = update.state_shardings(MODEL, transform, mesh)

def fresh(params):
    return update.init_state(params, transform, jax.random.key(0))

shapes = jax.eval_shape(lambda: qwen3.init_params(MODEL, jax.random.key(0)))
rng = np.random.default_rng(0)
params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), shapes)
checkpoints = Checkpoints(Path(directory), keep=1)
found = checkpoints.restore(abstract_like(jax.eval_shape(fresh, shapes), layout))
if found:
    assert found.extra == {"nonfinite": 0}
    done, state = found.step, found.state
else:
    params = jax.device_put(params, layout.params)
    done, state = 0, jax.jit(fresh, out_shardings=layout)(params)
compute = update.ComputeConfig(logprob_chunk=32)
step = update.make_update(MODEL, optimizer, losses.LossConfig(kl="off"), compute, mesh)
batch = batching.pack(doubles.all_sequences(), batching.BatchLayout(4, 40, 2))
seen = []
for number in range(done + 1, 5):
    placed = update.put_batch(batch, mesh)
    with jax.transfer_guard("disallow"):
        state, outcome = step(state, None, placed)
    metrics = update.metrics(outcome)
    seen.append((number, metrics["actor/loss"], metrics["actor/grad_norm"]))
    if number == 2:
        checkpoints.save(number, state, None, nonfinite=0)
checkpoints.close()
print(json.dumps(seen))
"""


AGREEMENTS = """
import asyncio, json, os, signal
import jax
from rlds_jax import processes
from rlds_jax.stopping import StopRequested, StopSignals
from rlds_jax.tasks.base import TaskUnavailable

processes.initialise(True)
me = jax.process_index()
told = processes.first(lambda: "made", lambda: "waited")
played = processes.interleave([(me, slot) for slot in processes.share(5)])
ended = []

def fail():
    if me == 1:
        raise TaskUnavailable("its server is down")
    return "rollouts"

async def play():
    if me == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)

with StopSignals() as signals:
    for work in (fail, lambda: signals.run(play())):
        try:
            processes.agree(work)
        except (TaskUnavailable, StopRequested) as error:
            ended.append([type(error).__name__, str(error)])
print(json.dumps([told, played, ended]))
"""


def start(port, process, devices, *command):
    root = Path(__file__).parent.parent
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(process),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}",
    }
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def two(devices, *command):
    """What each of two processes prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = [start(port, process, devices, *command) for process in (0, 1)]
    return [finished(each) for each in running]


def finished(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def last_line(out):
    """Of a script; above it Gloo prints its own."""
    return json.loads(out.splitlines()[-1])


def trained(directory, fsdp, tensor):
    """Steps, losses and gradient norms by both processes."""
    printed = two(2, "-c", SCRIPT, directory, fsdp, tensor)
    return [np.array(last_line(out)) for out in printed]


@pytest.mark.slow
def test_two_processes_go_on_over_another_mesh_with_the_same_numbers(tmp_path):
    whole, other = trained(tmp_path, fsdp=2, tensor=2)
    np.testing.assert_array_equal(whole, other)
    assert whole[:, 0].tolist() == [1, 2, 3, 4]
    for resumed in trained(tmp_path, fsdp=4, tensor=1):
        np.testing.assert_allclose(resumed, whole[2:], rtol=1e-5)


@pytest.mark.slow
def test_what_happens_to_one_process_ends_both():
    played = [[0, 0], [1, 1], [0, 2], [1, 3], [0, 4]]
    ended = [["TaskUnavailable", "its server is down"], ["StopRequested", "SIGTERM"]]
    for told, out in zip(("made", "waited"), two(1, "-c", AGREEMENTS), strict=True):
        assert last_line(out) == [told, played, ended]


@pytest.mark.slow
def test_the_training_command_in_two_processes_is_that_of_one(tiny_run, tmp_path):
    """The same rollouts, whoever plays them, and the same updates to rounding."""
    flags = ["--config=configs/frozenlake.py:tiny", "--config.steps=2", f"--workdir={tmp_path}"]
    flags += ["--config.prompts_per_step=2", "--config.validation.num_items=8"]
    printed = two(1, "-m", "rlds_jax.train", *flags, "--config.distributed=True")
    assert ["summary.json" in out for out in printed] == [True, False]
    assert run_files.validations(tmp_path) == run_files.validations(tiny_run)
    for found, expected in zip(*map(run_files.rollouts, (tmp_path, tiny_run)), strict=True):
        numbers = ("advantage", "grpo_advantage", "turn_advantages")
        assert {k: x for k, x in found.items() if k not in numbers} == {
            k: x for k, x in expected.items() if k not in numbers
        }
        for name in numbers:
            assert found[name] == pytest.approx(expected[name], abs=1e-5)
    scalars, expected = map(run_files.scalars, (tmp_path, tiny_run))
    assert scalars.keys() == expected.keys()
    for name in scalars:
        if name.startswith(("actor/", "aux/", "critic/", "sdae/", "retry/delta", "perf/total")):
            assert scalars[name] == pytest.approx(expected[name], abs=1e-5), name
    params, expected = (saved.policy(run, "last")[-1] for run in (tmp_path, tiny_run))
    difference = optax.tree.norm(optax.tree.sub(params, expected))
    assert difference < 1e-5 * optax.tree.norm(expected)
