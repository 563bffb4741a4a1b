"""Weights by NCCL: a double of the library, the scripted sidecar; the worker's half in vLLM."""

import base64
import ctypes
import json
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from nccl_doubles import VERSION, FakeNccl
from small_engine import CONFIG, PARAMS
from vllm_doubles import (
    HERE,
    SIDECAR_PYTHON,
    expect_counting,
    make_engine,
    sample_many,
    settings,
)

from rlds_jax.models.weights import to_hf_tensors
from rlds_jax.rollouts.engines import cuda_driver, nccl
from rlds_jax.rollouts.engines.vllm_process import SidecarFailed
from rlds_jax.rollouts.engines.vllm_transport import make_transport
from rlds_jax.rollouts.engines.weight_buckets import Layout, fill

WHOLE = NamedSharding(jax.make_mesh((1,), ("fsdp",)), PartitionSpec())
NCCL = {
    "placement": "disjoint",
    "weight_transport": "nccl",
    "bucket_bytes": 2**18,
    "update_timeout_s": 30.0,
}

# What goes wrong -> how it is brought about in the sidecar and in the library, and the restarts.
FAILURES = {
    "a peer dies in a broadcast": ({"die_updating": 1}, {}, 1),
    "a peer hangs in one": ({"hang_updating": 1}, {}, 1),
    "the library loses a peer": ({}, {"remote_errors": 1}, 1),
    "a new group is refused": ({"fail_update": 1}, {"refusals": 1}, 2),
    "a peer does not join": ({"fail_update": 1, "hang_joining": 1}, {}, 2),
}


@pytest.fixture
def fake(faults, tmp_path, monkeypatch):
    fake = FakeNccl(tmp_path / "faults")
    monkeypatch.setattr(nccl, "load", lambda: nccl.Nccl(fake.library))
    monkeypatch.setattr(cuda_driver, "load", lambda: fake.driver)
    return fake


@pytest.fixture
def params():
    return jax.device_put(PARAMS, WHOLE)


def test_every_worker_of_every_replica_joins_and_gets_the_weights(fake, faults, params, tmp_path):
    """Trainer, and two replicas on two GPUs each; the survivor of a restart joins a new group."""
    gpus = {"replicas": 2, "tensor_parallel": 2, "gpus": (4, 5, 6, 7)}
    engine = make_engine(tmp_path, params=params, **NCCL, **gpus)
    engine.update_weights(params, 3)
    assert (fake.groups, fake.aborted) == ([5], 0)
    faults.set(die=1)
    completions = sample_many(engine, 8)
    expect_counting(completions)
    assert {c.weight_version for c in completions} == {3}
    assert engine.metrics()["engine/restarts"] == 1
    assert (fake.groups, fake.aborted) == ([5, 5], 1)
    engine.update_weights(params, 4)
    engine.close()
    assert (fake.groups, fake.aborted) == ([5, 5], 2)


def test_a_group_that_fails_is_left_and_made_anew(fake, faults, params, tmp_path):
    options = NCCL | {"gpus": (7,), "update_timeout_s": 3.0, "max_restarts": 7}
    engine = make_engine(tmp_path, params=params, **options)
    for version, (sidecar, library, restarts) in enumerate(FAILURES.values(), start=1):
        faults.set(**sidecar)
        for name, count in library.items():
            setattr(fake, name, count)
        engine.update_weights(params, version)
        (completion,) = sample_many(engine, 1)
        assert completion.weight_version == version
        assert engine.metrics()["engine/restarts"] == restarts
        assert fake.aborted == len(fake.groups) - 1
    engine.close()


def test_a_refusal_is_told_in_the_librarys_words(fake, params, tmp_path):
    fake.refusals = 1
    with pytest.raises(SidecarFailed, match=r"InitRankConfig: invalid usage: two ranks on one GPU"):
        make_engine(tmp_path, params=params, **NCCL, gpus=(7,))


def test_a_missing_library_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(nccl, "LIBRARY", "libnccl.so.absent")
    with pytest.raises(ValueError, match=r"weight_transport=nccl needs .* nvidia-nccl-cu12"):
        make_transport(settings(**NCCL, gpus=(7,)), CONFIG)


def test_sizes_are_those_of_the_header():
    assert ctypes.sizeof(nccl.UniqueId) == 128
    assert ctypes.sizeof(nccl.Config) == 24
    assert nccl.Config.blocking.offset == 16


@pytest.mark.vllm
def test_the_worker_joins_as_its_rank_and_unpacks_every_bucket():
    """The worker's half inside vLLM's environment; the library is a double, a broadcast a copy."""
    layout = Layout(CONFIG, "bfloat16", 2**16)
    buffer = np.zeros(layout.capacity, np.uint8)
    updates = [
        {
            "info": {
                "version": 9,
                "sequence": sequence,
                "tensors": layout.described(layout.buckets[sequence]),
            },
            "bucket": base64.b64encode(buffer).decode(),
        }
        for sequence in fill(buffer, PARAMS, layout, version=9)
    ]
    init = {
        "rank_offset": 3,
        "world_size": 5,
        "nccl_unique_id_b64": base64.b64encode(bytes(range(128))).decode(),
        "nccl_version": VERSION,
        "packed_buffer_size_bytes": layout.capacity,
    }
    done = subprocess.run(
        [SIDECAR_PYTHON, str(HERE / "nccl_worker.py")],
        input=json.dumps({"init": init, "updates": updates, "version": VERSION}),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["joined"] == [[4, 5, list(range(128))]] * 2
    assert found["left"] == 1
    assert found["refusal"] == f"rlds_jax sidecar: found NCCL {VERSION}, the trainer has 1"
    expected = dict(to_hf_tensors(PARAMS, CONFIG, jnp.dtype("bfloat16")))
    assert found["tensors"].keys() == expected.keys()
    for name, tensor in expected.items():
        shape, data = found["tensors"][name]
        assert tuple(shape) == tensor.shape
        assert base64.b64decode(data) == tensor.tobytes()
