"""The vLLM engine's settings are checked against each other; groups stay on a replica."""

import pytest
from vllm_doubles import settings

from rlds_jax.rollouts.engines.vllm_process import Launch
from rlds_jax.rollouts.engines.vllm_replicas import Router


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "engine.dtype"),
        ({"replicas": 0}, "engine.replicas"),
        ({"request_timeout_s": 0}, "engine.request_timeout_s"),
        ({"gpus": (0,)}, "engine.gpus lists 1"),
        ({"tensor_parallel": 2}, "engine.tensor_parallel"),
        ({"cache_bytes": None}, "engine.cache_bytes"),
        ({"placement": "disjoint", "gpus": (6, 6), "replicas": 2}, "twice"),
        ({"placement": "disjoint", "gpus": (8,)}, "engine.host_gpus"),
        ({"placement": "disjoint", "gpus": tuple(range(8)), "replicas": 8}, "leaves none"),
        ({"weight_transport": "mpi"}, "engine.weight_transport"),
        ({"weight_transport": "nccl"}, "nccl joins .*placement=disjoint"),
        ({"weight_transport": "cuda_ipc"}, "placement=shared"),
        ({"placement": "shared", "gpus": (0,), "memory_fraction": 0.99}, "memory_fraction"),
    ],
)
def test_a_field_that_does_not_hold_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_devices_are_split_between_trainer_and_replicas():
    both = {"replicas": 2, "tensor_parallel": 2, "gpus": (4, 5, 6, 7)}
    disjoint = settings(placement="disjoint", **both)
    assert disjoint.trainer_gpus == (0, 1, 2, 3)
    assert [disjoint.replica_gpus(i) for i in (0, 1)] == [(4, 5), (6, 7)]
    shared = settings(placement="shared", memory_fraction=0.4, **both)
    assert shared.trainer_gpus == tuple(range(8))
    assert settings().trainer_gpus == ()
    assert (shared.shares, disjoint.shares) == ((0.4, pytest.approx(0.05)), (0, 0))


def test_a_replica_sees_its_own_gpus_alone(monkeypatch, tmp_path):
    config = settings(placement="disjoint", gpus=(2, 3), replicas=2)
    launch = Launch(config, 1, tmp_path, tmp_path / "log")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launch.environment()["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert launch.environment()["CUDA_VISIBLE_DEVICES"] == "7"


def test_a_group_stays_on_its_replica_and_groups_are_spread():
    router = Router(2)
    homes = {group: router.start(group) for group in "abcd"}
    assert sorted(homes.values()) == [0, 0, 1, 1]
    assert all(router.start(group) == home for group, home in homes.items())
    router.end(0)
    assert router.start(None) == 0
