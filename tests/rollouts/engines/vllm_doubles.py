"""vLLM engines for tests: over the scripted sidecar, or over the real one."""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
from small_engine import CONFIG, PARAMS

from rlds_jax.rollouts.engines import vllm_process
from rlds_jax.rollouts.engines.vllm import VllmEngine
from rlds_jax.rollouts.engines.vllm_config import VllmConfig
from rlds_jax.rollouts.engines.vllm_transport import make_transport

HERE = Path(__file__).parent
FAKE, LEAKY = HERE / "fake_sidecar.py", HERE / "leaky_sidecar.py"
SIDECAR_PYTHON = os.environ.get("RLDS_SIDECAR_PYTHON", ".venv-vllm/bin/python")


class Faults:
    """What a scripted sidecar does wrong, and how many times."""

    def __init__(self, folder: Path):
        self._folder = folder

    def set(self, **times: int) -> None:
        for fault, count in times.items():
            (self._folder / fault).write_text(str(count))

    def seen(self, name: str) -> bool:
        """Whether the sidecar has left a note of that name."""
        return (self._folder / name).exists()


def settings(**changes):
    options = {
        "placement": "cpu",
        "replicas": 1,
        "gpus": (),
        "dtype": "float32",
        "max_context": 512,
        "max_requests": 16,
        "cache_bytes": 2**26,
        "bucket_bytes": 2**16,
    }
    return VllmConfig(**options | changes)


def run_instead(script, patch):
    """Sidecars started from now on run `script`."""
    patch.setattr(vllm_process, "SCRIPT", script)


def make_engine(logs, *, params=PARAMS, model=HERE, config=CONFIG, **changes):
    """An engine over the scripted sidecar, unless `python` says otherwise."""
    options = settings(**{"python": sys.executable, "start_timeout_s": 60.0} | changes)
    return VllmEngine(
        params,
        options,
        model=model,
        transport=make_transport(options, config),
        logs=logs / "sidecar_0",
    )


async def sample(engine, prompt, max_tokens=4, seed=0, temperature=1.0, **more):
    options = {"stop_ids": ()} | more
    return await engine.generate(
        prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, **options
    )


def sample_many(engine, count, **options):
    """Prompts [i, i] for i < count, at once; exceptions among the completions."""

    async def all_of_them():
        work = (sample(engine, [i, i], seed=i, **options) for i in range(count))
        return await asyncio.gather(*work, return_exceptions=True)

    return asyncio.run(all_of_them())


def expect_counting(completions):
    for i, completion in enumerate(completions):
        np.testing.assert_array_equal(completion.ids, i + 1 + np.arange(len(completion.ids)))
