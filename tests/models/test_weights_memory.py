"""What loading and saving take of the host's memory, on one device and on a mesh of eight.

Measured as the process's anonymous resident memory every millisecond: what is mapped from the
files is not in it.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import contextlib, gc, pathlib, re, sys, threading, time
import jax, jax.numpy as jnp
from rlds_jax import sharding
from rlds_jax.models import qwen3, weights
from rlds_jax.models.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=40000, hidden_size=512, intermediate_size=2048, num_layers=6, num_heads=8,
    num_kv_heads=2, head_dim=64, rope_theta=1e6, tie_embeddings=True,
)
weights.CHUNK_BYTES = 4 * 2**20
SHARD = 24 * 2**20


def anonymous():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", status)[1]) * 1024


@contextlib.contextmanager
def peak(seen):
    gc.collect()
    base, done = anonymous(), threading.Event()

    def watch():
        while not done.is_set():
            seen.append(anonymous() - base)
            time.sleep(1e-3)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    done.set()
    thread.join()


mesh = sharding.make_mesh(*map(int, sys.argv[2:]))
shardings = sharding.parameter_shardings(CONFIG, mesh)
shapes = jax.eval_shape(lambda: qwen3.init_params(CONFIG, jax.random.key(0)))
params = jax.tree.map(lambda x, s: jnp.ones(x.shape, x.dtype, device=s), shapes, shardings)
out = pathlib.Path(sys.argv[1])
weights.save(params, CONFIG, out, jnp.float32, shard_bytes=SHARD)  # compiles
weights.load(out, jnp.float32, shardings)

saving, loading = [], []
with peak(saving):
    weights.save(params, CONFIG, out, jnp.float32, shard_bytes=SHARD)
del params
with peak(loading):
    _, loaded = weights.load(out, jnp.float32, shardings)

held = sum(s.data.nbytes for x in jax.tree.leaves(loaded) for s in x.addressable_shards)
layer = sum(x.nbytes for x in jax.tree.leaves(loaded["layers"])) // CONFIG.num_layers
embed = loaded["embed"].nbytes  # one file, and here a copy on every replica
print(f"held {held}, layer {layer}: load {max(loading) - held} more, save {max(saving)}")
assert 0.95 * held < max(loading) < held + layer + weights.CHUNK_BYTES
assert 0.95 * embed < max(saving) < 1.05 * embed * (1 + mesh.shape["data"])
"""


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (1, 2, 2, 2)], ids=str)
def test_neither_way_holds_the_model(mesh, tmp_path):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={math.prod(mesh)}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        # Freed arrays go back to the system: what malloc kept would hide the next ones.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *map(str, mesh)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
