"""Loading into meshes of eight simulated devices gives the values that were saved."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import dataclasses, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rlds_jax import sharding
from rlds_jax.models import qwen3, weights
from rlds_jax.models.config import ModelConfig

QWEN3 = ModelConfig(
    vocab_size=72, hidden_size=24, intermediate_size=40, num_layers=4, num_heads=8,
    num_kv_heads=2, head_dim=6, rope_theta=1e6, tie_embeddings=False,
)
QWEN2 = dataclasses.replace(QWEN3, qk_norm=False, attention_bias=True)
weights.CHUNK_BYTES = 5 * 24 * 4  # five rows of the embedding: neither 72 nor 36 is a multiple


def by_rules(config, *sizes):
    return sharding.parameter_shardings(config, sharding.make_mesh(*sizes))


def along(config, axis):
    '''Everything on one axis of its own, the stacked and the merged ones included.'''
    mesh = sharding.make_mesh(devices=jax.devices()[:2], fsdp=2)
    shapes = jax.eval_shape(lambda: qwen3.init_params(config, jax.random.key(0)))

    def one(x):
        spec = [None] * x.ndim
        spec[min(axis, x.ndim - 1)] = "fsdp"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(one, shapes)


assert len(jax.devices()) == 8
for config in (QWEN3, QWEN2):
    params = qwen3.init_params(config, jax.random.key(0))
    directory = pathlib.Path(sys.argv[1]) / config.to_hf()["model_type"]
    weights.save(params, config, directory, jnp.float32, shard_bytes=6000)
    layouts = [by_rules(config, 1, 8, 1), by_rules(config, 2, 2, 2), along(config, 0)]
    for layout in [*layouts, along(config, 3)]:
        _, loaded = weights.load(directory, jnp.float32, layout)
        jax.tree.map(np.testing.assert_array_equal, loaded, params)
        assert jax.tree.map(lambda x: x.sharding, loaded) == layout
    weights.save(loaded, config, directory, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, weights.load(directory)[1], params)
print("agrees")
"""


def test_eight_devices_hold_what_was_saved(tmp_path):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "agrees"
