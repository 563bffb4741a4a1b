"""Settings of the vLLM engine, checked for sense before anything starts."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

VLLM_VERSION = "0.32.0"

Placement = Literal["cpu", "disjoint", "shared"]
WeightTransport = Literal["shared_memory", "cuda_ipc", "nccl"]

# Of one GPU's memory; what is left is for CUDA contexts and workspaces, of a sleeper too.
SHAREABLE = 0.95


@dataclasses.dataclass(frozen=True)
class VllmConfig:
    """Sidecars that roll out with vLLM (DESIGN "Engines").

    Attributes:
      python: interpreter of the sidecar's environment (docs/sidecar.md says how to build it).
      max_context: longest prompt plus completion, in tokens.
      dtype: of weights, activations and cache.
      max_requests: most requests running at once on one replica.
      cache_bytes: key-value cache of one replica; None on a GPU: what `memory_fraction` leaves.
      replicas: independent engines. A group's requests stay on one, so that prefixes are reused.
      tensor_parallel: GPUs of one replica.
      placement: "cpu"; "disjoint": `gpus` are the engine's alone; "shared": they are the trainer's
        too, and the engine sleeps while the optimizer works.
      host_gpus: GPUs of this host.
      gpus: indices of the engine's GPUs, replicas * tensor_parallel of them; empty on a CPU.
      memory_fraction: of each of `gpus` that is the engine's while it is awake.
      weight_transport: "shared_memory"; "cuda_ipc" where every GPU is shared; "nccl" where none is.
      bucket_bytes: memory that weights pass through; at least the largest tensor is taken.
      start_timeout_s: for a sidecar to come up, its first weights not included.
      request_timeout_s: for one completion, from when it is sent.
      update_timeout_s: for each phase of an update.
      max_restarts: of sidecars in one run, before the run gives up.

    Raises:
      ValueError: naming the field that does not hold and what to set it to.
    """

    python: str = ".venv-vllm/bin/python"
    max_context: int = 8192
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_requests: int = 256
    cache_bytes: int | None = None
    replicas: int = 4
    tensor_parallel: int = 1
    placement: Placement = "disjoint"
    host_gpus: int = 8
    gpus: tuple[int, ...] = (4, 5, 6, 7)
    memory_fraction: float = 0.9
    weight_transport: WeightTransport = "shared_memory"
    bucket_bytes: int = 2**29
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0
    update_timeout_s: float = 600.0
    max_restarts: int = 3

    def __post_init__(self):
        self._check_choices()
        for name in ("max_context", "max_requests", "replicas", "tensor_parallel", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("start_timeout_s", "request_timeout_s", "update_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; it must be positive")
        if self.max_restarts < 0:
            raise ValueError(f"engine.max_restarts is {self.max_restarts}; 0 is the least")
        self._check_gpus()
        self._check_memory()
        if self.weight_transport == "nccl" and self.placement != "disjoint":
            raise ValueError(
                "engine.weight_transport=nccl joins the trainer's GPU with the engine's, each of "
                "them once: use engine.placement=disjoint, or "
                "engine.weight_transport=shared_memory"
            )
        if self.weight_transport == "cuda_ipc" and self.placement != "shared":
            raise ValueError(
                "engine.weight_transport=cuda_ipc reaches a worker on a GPU of the trainer's: use "
                "engine.placement=shared, or engine.weight_transport=shared_memory"
            )

    def _check_choices(self) -> None:
        for name, choices in (
            ("dtype", ("bfloat16", "float32")),
            ("placement", get_args(Placement)),
            ("weight_transport", get_args(WeightTransport)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"engine.{name} is {getattr(self, name)!r}; use one of {', '.join(choices)}"
                )

    def _check_gpus(self) -> None:
        wanted = 0 if self.placement == "cpu" else self.replicas * self.tensor_parallel
        if len(self.gpus) != wanted:
            raise ValueError(
                f"engine.gpus lists {len(self.gpus)} GPUs; placement {self.placement} with "
                f"{self.replicas} replicas of {self.tensor_parallel} needs {wanted}"
            )
        if self.placement == "cpu" and self.tensor_parallel > 1:
            raise ValueError("engine.tensor_parallel must be 1 with placement cpu")
        if len(set(self.gpus)) != len(self.gpus):
            raise ValueError(f"engine.gpus {list(self.gpus)} names a GPU twice")
        outside = [gpu for gpu in self.gpus if not 0 <= gpu < self.host_gpus]
        if outside:
            raise ValueError(
                f"engine.gpus names {outside}, but engine.host_gpus is {self.host_gpus}"
            )
        if self.placement == "disjoint" and not self.trainer_gpus:
            raise ValueError(
                "engine.gpus takes every GPU and leaves none for the trainer: take fewer, or use "
                "engine.placement=shared"
            )

    def _check_memory(self) -> None:
        if not 0 < self.memory_fraction <= SHAREABLE:
            raise ValueError(
                f"engine.memory_fraction is {self.memory_fraction}; it must be in (0, {SHAREABLE}]"
            )
        if self.placement == "cpu" and self.cache_bytes is None:
            raise ValueError("engine.cache_bytes must be set with placement cpu")

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives up its memory while the optimizer works."""
        return self.placement == "shared"

    @property
    def shares(self) -> tuple[float, float]:
        """Parts of the memory of a GPU of the trainer that the engine has awake, and asleep."""
        return (self.memory_fraction, 1 - SHAREABLE) if self.sleeps else (0.0, 0.0)

    @property
    def trainer_gpus(self) -> tuple[int, ...]:
        """The trainer's GPUs; none on a CPU."""
        if self.placement == "cpu":
            return ()
        taken = self.gpus if self.placement == "disjoint" else ()
        return tuple(gpu for gpu in range(self.host_gpus) if gpu not in taken)

    def replica_gpus(self, replica: int) -> tuple[int, ...]:
        """The GPUs of one replica."""
        first = replica * self.tensor_parallel
        return self.gpus[first : first + self.tensor_parallel]
