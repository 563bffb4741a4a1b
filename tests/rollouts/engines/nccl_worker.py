"""The worker's half of the NCCL transport in vLLM's environment: told what to do, says what it did.

Rank 1 of a replica of two joins, joins again, receives every bucket, and meets another version.
"""

import base64
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "rlds_jax" / "rollouts" / "engines" / "vllm_sidecar"))
import transfer  # noqa: E402


class Model:
    def __init__(self):
        self.tensors = {}

    def load_weights(self, weights):
        self.tensors |= weights


class Group:
    """In place of a communicator."""

    joined, left, buckets = [], 0, []

    def __init__(self, unique_id, rank, world_size, device):
        Group.joined.append([rank, world_size, list(unique_id)])

    def broadcast(self, tensor, src):
        bucket = bytearray(base64.b64decode(Group.buckets.pop(0)))
        tensor.copy_(torch.frombuffer(bucket, dtype=torch.uint8))

    def destroy(self):
        Group.left += 1


def main():
    told = json.load(sys.stdin)
    PyNcclCommunicator.from_unique_id_bytes = Group
    torch.accelerator.current_device_index = lambda: 0
    transfer.NCCLLibrary = lambda: SimpleNamespace(ncclGetRawVersion=lambda: told["version"])
    transfer.register()
    model = Model()
    worker = WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend="rlds_nccl"),
        SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=2, rank=1),
            model_config=None,
        ),
        torch.device("cpu"),
        model,
    )
    for _ in range(2):
        worker.init_transfer_engine(worker.parse_init_info(told["init"]))
    for update in told["updates"]:
        Group.buckets.append(update["bucket"])
        worker.receive_weights(worker.parse_update_info(update["info"]))
    left = Group.left
    try:
        worker.init_transfer_engine(worker.parse_init_info(told["init"] | {"nccl_version": 1}))
    except RuntimeError as error:
        refusal = str(error)
    tensors = {
        name: (tensor.shape, base64.b64encode(tensor.view(torch.uint8).numpy()).decode())
        for name, tensor in model.tensors.items()
    }
    said = {"joined": Group.joined, "left": left, "refusal": refusal, "tensors": tensors}
    print(json.dumps(said))


main()
