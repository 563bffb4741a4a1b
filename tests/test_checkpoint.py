"""Checkpoints: bitwise, the latest and the best, damage found."""

import json
import logging
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from rlds_jax import checkpoint, update
from rlds_jax.checkpoint import CheckpointConfig, CheckpointError, Checkpoints

OPTIMIZER = update.make_optimizer(update.OptimizerConfig())


def state_of(value):
    params = {"layer": {"kernel": jnp.full((3, 5), value, jnp.float32)}}
    state = update.init_state(params, OPTIMIZER, jax.random.key(int(value)))
    return state.replace(step=jnp.int32(value))


def abstract():
    state = state_of(0)
    return checkpoint.abstract_like(state, jax.tree.map(lambda x: x.sharding, state))


def data(tree):
    return jax.tree.map(
        lambda x: np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ),
        tree,
    )


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 1 to 4, the best of which is 1."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, state_of(step), best=1, nonfinite=step)
    checkpoints.wait()
    checkpoints.close()
    return tmp_path


def restore(directory):
    checkpoints = Checkpoints(directory, keep=2)
    try:
        return checkpoints.restore(abstract())
    finally:
        checkpoints.close()


def damage(directory, step):
    files = [path for path in (directory / str(step) / "params").rglob("*") if path.is_file()]
    path = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_newest_comes_back_as_it_was(saved):
    found = restore(saved)
    assert (found.step, found.extra) == (4, {"nonfinite": 4})
    jax.tree.map(np.testing.assert_array_equal, data(found.state), data(state_of(4)))


def test_the_latest_and_the_best_are_kept(saved):
    assert checkpoint.steps(saved) == [1, 3, 4]


def test_parameters_are_read_alone(saved):
    params = checkpoint.load_params(saved, 1, abstract().params)
    jax.tree.map(np.testing.assert_array_equal, params, state_of(1).params)


def test_saving_a_step_again_changes_nothing(saved):
    checkpoints = Checkpoints(saved, keep=2)
    checkpoints.save(4, state_of(9), best=1, nonfinite=0)
    checkpoints.close()
    assert restore(saved).extra == {"nonfinite": 4}


def test_donated_arrays_do_not_reach_a_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    state = jax.device_put(state_of(1))
    checkpoints.save(1, state, best=None)
    jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s.params), donate_argnums=0)(state)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path).state.params, state_of(1).params)


@pytest.mark.parametrize("how", [damage, lambda d, s: (d / str(s) / "digest.json").unlink()])
def test_a_damaged_checkpoint_gives_way_to_the_last_good_one(how, saved, caplog):
    how(saved, 4)
    assert restore(saved).step == 3
    assert "checkpoint 4 is damaged" in caplog.text
    assert checkpoint.steps(saved) == [1, 3]
    assert (saved / "4.damaged-1" / "params").is_dir()


NO_LISTS = '{"params/a": 1, "optimizer/a": 1, "extra/a": 1}'


@pytest.mark.parametrize("digest", ["[]", "{}", '{"params/a": [1, 2]}', NO_LISTS])
def test_a_digest_of_another_shape_is_a_fault(digest, tmp_path):
    (tmp_path / "digest.json").write_text(digest)
    assert "does not list the files of params" in checkpoint.find_fault(tmp_path)


def test_a_checkpoint_that_cannot_be_read_gives_way_too(saved):
    """Its files are as they were written, but they hold something else."""
    shutil.rmtree(saved / "4" / "extra")
    digest = json.loads((saved / "4" / "digest.json").read_text())
    kept = {name: entry for name, entry in digest.items() if not name.startswith("extra/")}
    (saved / "4" / "extra").mkdir()
    (saved / "4" / "extra" / "note").write_bytes(b"")
    (saved / "4" / "digest.json").write_text(json.dumps(kept | {"extra/note": [0, 0]}))
    assert restore(saved).step == 3


def test_what_is_no_checkpoint_is_left_alone(saved):
    others = ["3-good", "4.damaged-1", "my.orbax-checkpoint-tmp", "mybackup", "²"]
    for name in others:
        (saved / name).mkdir()
    damage(saved, 4)
    assert restore(saved).step == 3
    assert sorted(path.name for path in saved.iterdir()) == sorted(
        ["1", "3", "4.damaged-2", *others]
    )


def test_only_damaged_checkpoints_are_an_error_and_stay(saved):
    for step in (1, 3, 4):
        damage(saved, step)
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        restore(saved)
    assert checkpoint.steps(saved) == [1, 3, 4]


def test_reading_a_damaged_or_an_absent_step_is_refused(saved):
    damage(saved, 1)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load_params(saved, 1, abstract().params)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2, but of \[1, 3, 4\]"):
        checkpoint.load_params(saved, 2, abstract().params)
    with pytest.raises(CheckpointError, match="no checkpoint of step 0, and no other"):
        checkpoint.load_params(saved / "nowhere", 0, abstract().params)


def test_a_checkpoint_that_the_disk_cannot_hold_is_not_begun(saved, monkeypatch):
    usage = shutil.disk_usage(saved)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    checkpoints = Checkpoints(saved, keep=2)
    with pytest.raises(CheckpointError, match=r"step 5 takes \d+ bytes and 100 are left"):
        checkpoints.save(5, state_of(5), best=1, nonfinite=0)
    checkpoints.close()
    assert restore(saved).step == 4


def test_what_orbax_logs_beside_its_errors_is_dropped_and_nothing_else(saved):
    Checkpoints(saved, keep=2).close()
    logger = logging.getLogger("absl")
    for path, kept in ((ocp.__file__, False), (__file__, True)):
        record = logger.makeRecord("absl", logging.ERROR, path, 1, "raised", (), None)
        assert bool(logger.filter(record)) == kept


SAVED_ON_ANOTHER_MESH = """
import sys, jax, jax.numpy as jnp, numpy as np
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec
from rlds_jax import checkpoint, update

optimizer = update.make_optimizer(update.OptimizerConfig())
weights = {"w": jnp.arange(64.0).reshape(8, 8)}
state = update.init_state(weights, optimizer, jax.random.key(3))

def laid_out(mesh_shape, spec):
    mesh = jax.make_mesh(mesh_shape, ("data", "fsdp"))
    axes = lambda x: PartitionSpec(*spec) if x.ndim == 2 else PartitionSpec()
    return jax.tree.map(lambda x: NamedSharding(mesh, axes(x)), state)

before, after = laid_out((1, 8), (None, "fsdp")), laid_out((2, 4), ("fsdp", "data"))
checkpoints = checkpoint.Checkpoints(Path(sys.argv[1]), keep=1)
checkpoints.save(1, jax.device_put(state, before), best=None)
checkpoints.wait()
found = checkpoints.restore(checkpoint.abstract_like(state, after)).state
checkpoints.close()
assert found.params["w"].sharding == after.params["w"]
np.testing.assert_array_equal(found.params["w"], weights["w"])
assert (jax.random.key_data(found.rng) == jax.random.key_data(state.rng)).all()
"""


def test_a_state_saved_on_one_mesh_comes_back_on_another(tmp_path):
    devices = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", SAVED_ON_ANOTHER_MESH, str(tmp_path)],
        env=os.environ | {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_nothing_saved_is_nothing_restored(tmp_path):
    assert restore(tmp_path) is None


def test_a_checkpoint_in_the_making_is_not_used(saved):
    (saved / "4").rename(saved / "4.orbax-checkpoint-tmp")
    assert restore(saved).step == 3
    assert sorted(path.name for path in saved.iterdir()) == ["1", "3"]


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1)


@pytest.mark.parametrize(("field", "value"), [("every", -1), ("keep", 0)])
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"checkpoint.{field} is {value}"):
        CheckpointConfig(**{field: value})


def test_when_a_checkpoint_is_due():
    assert [step for step in range(8) if CheckpointConfig(every=3).due(step, 7)] == [3, 6, 7]
    assert [step for step in range(8) if CheckpointConfig(every=0).due(step, 7)] == [7]
