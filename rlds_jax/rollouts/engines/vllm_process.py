"""One sidecar process: started, watched over, and ended with every process it made."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp

from rlds_jax.rollouts.engines.vllm_config import VLLM_VERSION, VllmConfig

SCRIPT = Path(__file__).parent / "vllm_sidecar" / "serve.py"
LOG_LINES = 30
_POLL_S = 0.2

# What a log says -> what to do about it.
_KNOWN = (
    (
        "operator torchvision::nms does not exist",
        "torchvision in the sidecar's environment does not fit its torch: uninstall torchvision, "
        "torchaudio and torchcodec there (`make sidecar` does)",
    ),
    (
        "rlds_jax sidecar: found vLLM",
        f"the sidecar is written for vLLM {VLLM_VERSION}; install that version in its environment "
        "(`make sidecar` does for a CPU)",
    ),
    (
        "rlds_jax sidecar: found NCCL",
        "trainer and sidecar must have the same NCCL: install nvidia-nccl-cu12 in the trainer's "
        "environment at the version of the sidecar's",
    ),
    (
        "No module named",
        "the sidecar's environment is incomplete; build it again (`make sidecar`)",
    ),
    (
        "out of memory",
        "the GPU has too little memory left: lower engine.memory_fraction or engine.max_context",
    ),
    (
        "is less than desired GPU memory utilization",
        "the trainer holds too much of the GPU already: lower engine.memory_fraction",
    ),
    (
        "to serve at least one request with the models's max seq len",
        "raise engine.cache_bytes, or lower engine.max_context",
    ),
)


class SidecarFailed(RuntimeError):
    """A sidecar did not come up, died or broke the protocol; the message ends with its log."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """What one replica is started with.

    Attributes:
      config: of the engine.
      replica: its number.
      model: directory with config.json and tokenizer; no weights are read from it.
      log: file its output is appended to.
    """

    config: VllmConfig
    replica: int
    model: Path
    log: Path

    def engine_options(self) -> dict[str, Any]:
        """Arguments of vLLM's engine."""
        config = self.config
        options: dict[str, Any] = {
            "model": str(self.model),
            "dtype": config.dtype,
            "max_model_len": config.max_context,
            "max_num_seqs": config.max_requests,
            "tensor_parallel_size": config.tensor_parallel,
            "weight_backend": f"rlds_{config.weight_transport}",
            "seed": 0,
        }
        if config.cache_bytes is not None:
            options["kv_cache_memory_bytes"] = config.cache_bytes
        if config.placement == "cpu":
            # A seeded request whose prefill is split kills vLLM 0.32 on a CPU: never split one.
            # By its full name the executor is not replaced by one that starts a process more.
            return options | {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(2048, config.max_context),
                "enforce_eager": True,
                "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            }
        return options | {
            "gpu_memory_utilization": config.memory_fraction,
            "enable_sleep_mode": config.sleeps,
        }

    def environment(self) -> dict[str, str]:
        """The trainer's environment, less what would lead the other interpreter astray."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "JAX_", "XLA_")) and name != "VIRTUAL_ENV"
        }
        kept |= {
            "PYTHONUNBUFFERED": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.config.placement == "cpu":
            # Binding would put every replica on the same core, and spinning threads would take the
            # cores from the trainer; compiling costs more than it gives.
            threads = max(1, len(os.sched_getaffinity(0)) // self.config.replicas)
            return kept | {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(threads),
                "OMP_WAIT_POLICY": "PASSIVE",
                "TORCHDYNAMO_DISABLE": "1",
            }
        gpus = [str(gpu) for gpu in self.config.replica_gpus(self.replica)]
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # of which the config names some
            gpus = [visible.split(",")[int(gpu)] for gpu in gpus]
        return kept | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


class Sidecar:
    """A running sidecar, which ends itself when this process is gone.

    It inherits a listening socket, so its port is taken before it starts and cannot be lost.

    Attributes:
      url: where it answers; token: what it asks for.

    Raises:
      SidecarFailed: the interpreter is missing or cannot be run.
    """

    def __init__(self, launch: Launch):
        self._launch = launch
        self.token = secrets.token_urlsafe(32)
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket() as listener, launch.log.open("ab") as log:
            self._log_start = log.tell()
            listener.bind(("127.0.0.1", 0))
            listener.listen(1024)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                self._process = subprocess.Popen(
                    [launch.config.python, str(SCRIPT)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=launch.environment(),
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise SidecarFailed(
                    f"engine.python is {launch.config.python!r} and cannot be run ({error}): build "
                    "the sidecar's environment with `make sidecar` (docs/sidecar.md), or name its "
                    "interpreter"
                ) from error
            self._send_settings(listener.fileno())

    def _send_settings(self, listener: int) -> None:
        settings = {
            "parent": os.getpid(),
            "token": self.token,
            "socket": listener,
            "vllm": VLLM_VERSION,
            "engine": self._launch.engine_options(),
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(settings).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    async def wait_until_ready(self, session: aiohttp.ClientSession) -> None:
        """Returns once it answers.

        Raises:
          SidecarFailed: it ended, or did not answer within engine.start_timeout_s.
        """
        deadline = time.monotonic() + self._launch.config.start_timeout_s
        while True:
            if not self.running:
                code = self._process.returncode
                raise self.failed(f"ended with exit code {code} before it was ready")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self.failed(
                    f"did not answer within engine.start_timeout_s "
                    f"({self._launch.config.start_timeout_s:g} s)"
                )
            if await self.answers(session, timeout_s=min(left, 2.0)):
                return

    async def answers(self, session: aiohttp.ClientSession, timeout_s: float) -> bool:
        """Whether it says that it is well."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        started = time.monotonic()
        try:
            async with session.get(
                f"{self.url}/health", headers=self.headers, timeout=timeout
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            if time.monotonic() - started < _POLL_S:
                await asyncio.sleep(_POLL_S)
            return False

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def failed(self, what: str, kind: type[SidecarFailed] = SidecarFailed) -> SidecarFailed:
        """The error that says so, with the remedy where the log shows a known cause."""
        text = self.log_text()
        remedy = next((remedy for sign, remedy in _KNOWN if sign in text), None)
        tail = "\n".join(f"  {line}" for line in text.splitlines()[-LOG_LINES:])
        return kind(
            f"sidecar {self._launch.replica} {what}"
            + (f": {remedy}" if remedy else "")
            + f"\n{self._launch.log} ends with\n{tail}"
        )

    def log_text(self) -> str:
        """What it has written since it was started."""
        with self._launch.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def stop(self) -> None:
        """Ends it and every process of its group. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
