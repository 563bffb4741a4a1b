"""A sidecar without vLLM: the real server, process rules included, over a scripted engine.

Run by path like the real one, but by the tests' own interpreter. It goes wrong as the files in
$RLDS_TEST_FAULTS say: each is named after a fault and holds how many times it is to happen.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "rlds_jax" / "rollouts" / "engines" / "vllm_sidecar"))
import serve  # noqa: E402
from nccl_doubles import Peers  # noqa: E402

FAULTS = Path(os.environ["RLDS_TEST_FAULTS"])
CRASHES = {
    "crash": "RuntimeError: something broke",
    "torchvision": "RuntimeError: operator torchvision::nms does not exist",
    "no_module": "ModuleNotFoundError: No module named 'vllm'",
}


def happens(fault):
    """Whether the fault is due; if so, it is due once less."""
    path = FAULTS / fault
    if not path.exists():
        return False
    left = int(path.read_text()) - 1
    if left:
        path.write_text(str(left))
    else:
        path.unlink()
    return True


class ScriptedEngine:
    """What the server asks of vLLM besides completions and the weights themselves."""

    errored = False

    def __init__(self, options):
        self.ranks = options["tensor_parallel_size"]

    async def check_health(self):
        if happens("unwell"):
            await asyncio.sleep(3600)

    async def sleep(self, level):
        (FAULTS / "asleep").touch()

    async def wake_up(self):
        (FAULTS / "asleep").unlink()

    async def pause_generation(self, mode, clear_cache):
        assert not (FAULTS / "asleep").exists()

    async def resume_generation(self):
        pass

    async def start_weight_update(self):
        pass

    async def finish_weight_update(self, version):
        pass

    async def reset_prefix_cache(self):
        return True


class FakeSidecar(serve.Sidecar):
    """Answers prompt [p, ...] with p + 1, p + 2, ...; of the weights it checks the stamp alone."""

    async def _complete(self, body):
        if happens("die"):
            os.killpg(0, signal.SIGKILL)
        if happens("hang"):
            await asyncio.sleep(3600)
        if happens("refuse"):
            raise ValueError("this schema is not supported")
        first, count = body["prompt_ids"][0], body["max_tokens"]
        await asyncio.sleep(0.01)
        return {
            "ids": [first + i + 1 for i in range(count)],
            "logprobs": [float("nan") if happens("nan") else -0.5] * count,
            "finish_reason": "length",
        }

    async def init_transfer(self, request):
        info = await request.json()
        self.peers = None
        if "path" in info:
            self.path = Path(info["path"])
            return serve.web.json_response({})
        if happens("hang_joining"):
            await asyncio.sleep(3600)
        self.peers = Peers(FAULTS, info, self._engine.ranks)
        await self.peers.join()
        return serve.web.json_response({})

    async def update(self, request):
        info = await request.json()
        if happens("fail_update"):
            raise RuntimeError("this bucket is broken")
        if happens("die_updating"):
            os.killpg(0, signal.SIGKILL)
        if happens("hang_updating"):
            await asyncio.sleep(3600)
        if self.peers is None:
            with self.path.open("rb") as bucket:
                header = bucket.read(16)
        else:
            header = (await self.peers.receive())[:16]
        assert list(memoryview(header).cast("q")) == [info["version"], info["sequence"]]
        return serve.web.json_response({})


def main():
    for fault, line in CRASHES.items():
        if happens(fault):
            print(line)
            raise SystemExit(1)
    if happens("mute"):
        time.sleep(3600)
    serve.Sidecar = FakeSidecar
    serve.make_engine = ScriptedEngine
    serve.vllm_version = lambda: "0.31.0" if happens("old") else "0.32.0"
    serve.register_transfers = lambda: None
    serve.main()


main()
