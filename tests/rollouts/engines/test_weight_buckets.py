"""Buckets hold exactly the checkpoint's tensors, whatever their size."""

import dataclasses
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_engine import CONFIG, PARAMS, random_params
from vllm_doubles import settings

from rlds_jax.models.weights import to_hf_tensors
from rlds_jax.rollouts.engines import vllm_cuda_ipc
from rlds_jax.rollouts.engines.weight_buckets import Layout, fill

UNTIED = dataclasses.replace(CONFIG, tie_embeddings=False, qk_norm=False, attention_bias=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 2**18, 2**30])
@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_every_tensor_arrives_once(config, bucket_bytes, dtype):
    params = PARAMS if config is CONFIG else random_params(0, config)
    layout = Layout(config, dtype, bucket_bytes)
    buffer = np.zeros(layout.capacity, np.uint8)
    found = {}
    for sequence in fill(buffer, params, layout, version=9):
        assert buffer[:16].view(np.int64).tolist() == [9, sequence]
        for name, offset, shape, of in layout.described(layout.buckets[sequence]):
            assert name not in found
            size = int(np.prod(shape)) * jnp.dtype(of).itemsize
            found[name] = buffer[offset : offset + size].view(jnp.dtype(of)).reshape(shape).copy()
    expected = dict(to_hf_tensors(params, config, jnp.dtype(dtype)))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)
    assert layout.total_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert (len(layout.buckets) == 1) == (bucket_bytes == 2**30)


def test_buckets_in_device_memory_hold_the_same_bytes(monkeypatch):
    """Sent by CUDA IPC, but for the driver's part."""
    config = settings(
        placement="shared", gpus=(0,), host_gpus=1, weight_transport="cuda_ipc", bucket_bytes=2**18
    )
    whole = NamedSharding(jax.make_mesh((1,), ("fsdp",)), PartitionSpec())
    params = jax.device_put(random_params(0, UNTIED), whole)
    held = {}
    monkeypatch.setattr(vllm_cuda_ipc, "_handle", lambda bucket: (np.asarray(bucket), 0))

    def post(messages):
        (message,) = messages
        ((held[message["sequence"]], _),) = message["handles"]
        described.append(message["tensors"])
        answered = Future()
        answered.set_result(None)
        return answered

    transport, described = vllm_cuda_ipc.CudaIpc(config, UNTIED), []
    transport.send(params, 9, post)
    layout = Layout(UNTIED, "float32", 2**18)
    buffer = np.zeros(layout.capacity, np.uint8)
    for sequence in fill(buffer, params, layout, version=9):
        np.testing.assert_array_equal(held[sequence], buffer)
        assert described[sequence] == layout.described(layout.buckets[sequence])
        buffer[:] = 0
    assert len(held) == len(layout.buckets) > 1
