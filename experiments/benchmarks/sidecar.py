"""vLLM in its sidecar: how fast weights reach it, and how fast it samples beside the local engine.

    make sidecar
    python -m experiments.record sidecar experiments.benchmarks.sidecar

Sync: a random model of 0.5 GB in bfloat16, held in float32; a pass is one whole update, from the
wait for requests in flight to the emptied prefix cache. Generation: every request of one RLDS step
of the demo, judges' included, to the demo's own policy in float32, all at once, each to the length
it had there, with a cold cache. Both engines answer in this process's run, in turn; the best pass
of each counts, after one that is not timed. Takes some five minutes on two CPU cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs import frozenlake
from experiments.benchmarks.engine import Request, demo_requests
from rlds_jax import play
from rlds_jax.models import hub, qwen3, weights
from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.engines.base import Engine
from rlds_jax.rollouts.engines.vllm import VllmEngine
from rlds_jax.rollouts.engines.vllm_config import VLLM_VERSION, VllmConfig
from rlds_jax.rollouts.engines.vllm_transport import make_transport

MODEL = ModelConfig(
    vocab_size=32768,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=14,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    rope_theta=1e6,
    tie_embeddings=True,
)
UPDATES, PASSES = 5, 2


def sync() -> dict[str, float]:
    """GB/s of whole updates; GB = 1e9 bytes."""
    settings = VllmConfig(
        placement="cpu",
        replicas=1,
        gpus=(),
        max_context=256,
        max_requests=8,
        cache_bytes=2**26,
        bucket_bytes=2**27,
    )
    params = jax.jit(qwen3.init_params, static_argnums=0)(MODEL, jax.random.key(0))
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory)
        tokenizer = hub.local_directory(frozenlake.get_config("tiny").model.path)
        weights.save(params, MODEL, source, source=tokenizer)
        transport = make_transport(settings, MODEL)
        log = source / "sidecar"
        engine = VllmEngine(params, settings, model=source, transport=transport, logs=log)
        with contextlib.closing(engine):
            rates = []
            for version in range(1, UPDATES + 1):
                engine.update_weights(params, version)
                rates.append(engine.metrics()["engine/sync_gb_per_s"])
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {
        "gigabytes": 2 * count / 1e9,
        "gb_per_s": float(np.median(rates)),
        "gb_per_s_best": max(rates),
    }


def generation() -> dict[str, Any]:
    """Sampled tokens per second of both engines."""
    requests = demo_requests(frozenlake.get_config("tiny"))
    engines: dict[str, Engine] = {}
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as opened:
        for kind, arg in (("local", "tiny"), ("vllm", "tiny,vllm")):
            config = frozenlake.get_config(arg)
            source = hub.local_directory(config.model.path)
            model, params = weights.load(source)
            engines[kind] = play.make_engine(config, source, model, params, 0, None)
            opened.callback(engines[kind].close)
            seconds[kind] = []
        for index in range(1 + PASSES):
            for kind, engine in engines.items():
                engine.update_weights(params, index + 1)  # empties the cache
                started = time.perf_counter()
                asyncio.run(answer(engine, requests))
                seconds[kind].append(time.perf_counter() - started)
    tokens = sum(r.new for r in requests)
    rates = {f"{kind}_tokens_per_s": tokens / min(each[1:]) for kind, each in seconds.items()}
    prompts = sum(len(r.prompt) for r in requests)
    return {"requests": len(requests), "prompt_tokens": prompts, "tokens": tokens, **rates}


async def answer(engine: Engine, requests: Sequence[Request]) -> None:
    work = (
        engine.generate(r.prompt, max_tokens=r.new, temperature=1.0, stop_ids=(), seed=seed)
        for seed, r in enumerate(requests)
    )
    completions = await asyncio.gather(*work)
    assert [len(c.ids) for c in completions] == [r.new for r in requests]


if __name__ == "__main__":
    result = {"vllm": VLLM_VERSION, "sync": sync(), "generation": generation()}
    print(json.dumps(result, indent=1))
