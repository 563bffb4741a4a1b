"""One update on 8 simulated CPU devices against one device, and the mesh's errors."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import batch_doubles as doubles
import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from rlds_jax import sharding
from rlds_jax.models.partition import MESH_AXES, spec

SCRIPT = """
import dataclasses, functools, jax, numpy as np
import batch_doubles as doubles
from rlds_jax import batch as batching, losses, sharding, update
from rlds_jax.models import qwen3

MODEL = dataclasses.replace(
    doubles.MODEL, num_heads=16, num_kv_heads=8, intermediate_size=32, tie_embeddings=False
)

def train(mesh):
    optimizer = update.OptimizerConfig(learning_rate=1e-2)
    loss = losses.LossConfig(kl_coefficient=0.01)
    compute = update.ComputeConfig(logprob_chunk=32)
    step = update.make_update(MODEL, optimizer, loss, compute, mesh)
    params, reference = (qwen3.init_params(MODEL, jax.random.key(seed)) for seed in (0, 1))
    state = update.init_state(params, update.make_optimizer(optimizer), jax.random.key(0))
    if mesh is not None:
        layout = update.state_shardings(MODEL, update.make_optimizer(optimizer), mesh)
        state, reference = jax.device_put((state, reference), (layout, layout.params))
    batch = batching.pack(doubles.all_sequences(), batching.BatchLayout(8, 40, 2))
    seen = []
    for _ in range(3):
        state, outcome = step(state, reference, batch)
        metrics = update.metrics(outcome)
        seen.append((metrics["actor/loss"], metrics["actor/grad_norm"]))
    return seen, state

assert len(jax.devices()) == 8
one, one_state = train(None)
for sizes in ((1, 1, 8, 1), (1, 1, 4, 2), (1, 1, 1, 8), (2, 2, 2, 1)):
    mesh = sharding.make_mesh(*sizes)
    sharding.check_mesh(MODEL, mesh, rows=8)
    many, state = train(mesh)
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)
    q = state.params["layers"]["q"]
    assert q.addressable_shards[0].data.size == q.size // (sizes[2] * sizes[3])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-5), state.params, one_state.params
    )
print("agrees")
"""


def test_eight_devices_agree_with_one():
    root = Path(__file__).parent.parent
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "agrees"


def test_a_mesh_that_does_not_match_is_refused():
    with pytest.raises(ValueError, match="does not match"):
        sharding.make_mesh(data=3, fsdp=len(jax.devices()), tensor=1)


def test_the_free_axis_takes_what_is_left():
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"replica": 1, "data": 1, "fsdp": 1, "tensor": 1}


def abstract_mesh(**sizes):
    """A mesh's shape without devices, all that checks read."""
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in MESH_AXES), MESH_AXES)


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_would():
    model = dataclasses.replace(doubles.MODEL, num_heads=12, num_kv_heads=6)
    with pytest.raises(ValueError, match=r"mesh.tensor is 4.* 6 key-value heads.*\[1, 2, 3, 6\]"):
        sharding.check_mesh(model, abstract_mesh(tensor=4))
    sharding.check_mesh(model, abstract_mesh(tensor=3))


def test_rows_that_do_not_divide_are_refused_with_a_multiple_that_would():
    with pytest.raises(ValueError, match=r"batch\.rows is 6.*multiple of 4"):
        sharding.check_mesh(doubles.MODEL, abstract_mesh(replica=2, fsdp=2), rows=6)
    sharding.check_mesh(doubles.MODEL, abstract_mesh(replica=2, fsdp=2), rows=8)


def test_every_logical_axis_has_a_rule():
    specs = sharding.parameter_shardings(
        doubles.MODEL, sharding.make_mesh(devices=jax.devices()[:1])
    )
    assert specs["layers"]["gate"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert specs["embed"].spec == PartitionSpec("tensor", "fsdp")


def test_an_axis_that_does_not_divide_stays_whole():
    mesh = abstract_mesh(fsdp=4, tensor=3)
    assert spec(mesh, ("vocab", "embed"), (40, 16)) == PartitionSpec(None, "fsdp")
    assert spec(mesh, ("head_vocab", None), (24, 5)) == PartitionSpec(("fsdp", "tensor"), None)
