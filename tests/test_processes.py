"""Two processes with jax.distributed: they train, save, and go on over another mesh."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
import jax, numpy as np
import batch_doubles as doubles
from rlds_jax import batch as batching, losses, sharding, update
from rlds_jax.checkpoint import Checkpoints, abstract_like
from rlds_jax.models import qwen3

port, process, directory, fsdp, tensor = (*sys.argv[1:4], *map(int, sys.argv[4:]))
jax.distributed.initialize(f"localhost:{port}", 2, int(process))
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


def start(port, process, *arguments):
    root = Path(__file__).parent.parent
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}",
    }
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(port), str(process), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def two(directory, fsdp, tensor):
    """Steps, losses and gradient norms by both processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = [start(port, process, directory, fsdp, tensor) for process in (0, 1)]
    return [finished(each) for each in running]


def finished(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return np.array(json.loads(out.splitlines()[-1]))


@pytest.mark.slow
def test_two_processes_go_on_over_another_mesh_with_the_same_numbers(tmp_path):
    whole, other = two(tmp_path, fsdp=2, tensor=2)
    np.testing.assert_array_equal(whole, other)
    assert whole[:, 0].tolist() == [1, 2, 3, 4]
    for resumed in two(tmp_path, fsdp=4, tensor=1):
        np.testing.assert_allclose(resumed, whole[2:], rtol=1e-5)
