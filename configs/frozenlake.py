r"""FrozenLake with abstract symbols (METHOD section 6).

At paper scale, on 8 x H100 80 GB or a TPU v5p 2x2x2 slice:

    python -m rlds_jax.train --config=configs/frozenlake.py --workdir=runs/frozenlake

trains Qwen3-4B-Instruct-2507 for 312 steps of 64 prompts, 6 rollouts and up to 3 retries each.
This needs hardware it has not been run on.

On two CPU cores, with the policy that comes with the package:

    python -m rlds_jax.train --config=configs/frozenlake.py:tiny --workdir=runs/tiny

With the variant `vllm` (`frozenlake.py:tiny,vllm`) vLLM rolls out, in a sidecar (docs/sidecar.md).

The conditions to compare with are `frozenlake.py:rlvr` and `frozenlake.py:base_reflection`, and
`frozenlake.py:tiny,rlvr` and so on at small scale: 6 rollouts where rlds has 4 and up to 2 retries.
"""

from importlib import resources

from ml_collections import ConfigDict

from configs.common import get_common, parse_arg, section
from rlds_jax.tasks.frozenlake import FrozenLake


def get_config(arg: str | None = None) -> ConfigDict:
    chosen = parse_arg(arg, variants=["tiny"])
    config = get_common(chosen)
    config.task.factory = "rlds_jax.tasks.frozenlake:FrozenLake"
    config.task.options = section(FrozenLake)
    config.advantage.num_turns = 16
    if "tiny" in chosen:
        _tiny(config)
    return config.lock()


def _tiny(config: ConfigDict) -> None:
    config.steps = 20
    config.prompts_per_step = 16
    config.task.options.update(size=(4, 4), min_path=2, max_path=5, max_turns=6)
    config.advantage.num_turns = 8
    config.model.path = str(resources.files("rlds_jax") / "models" / "tiny")
    rlvr = config.rollout.condition == "rlvr"
    config.rollout.update(
        group_size=6 if rlvr else 4,
        retry_budget=2,
        max_prompt_tokens=256,
        max_response_tokens=512,
        max_turn_tokens=64,
        max_judge_tokens=256,
        max_guidance_tokens=128,
    )
    config.optimizer.learning_rate = 1e-4
    config.validation.every = 10
    config.compute.update(dtype="float32", remat="none", logprob_chunk=512)
    config.batch.update(rows=2, row_length=1280, max_micro=64)
    if config.engine.kind == "vllm":
        config.engine.update(
            placement="cpu",
            replicas=1,
            gpus=(),
            dtype="float32",
            max_context=1280,
            max_requests=64,
            cache_bytes=2**28,
            bucket_bytes=2**22,
        )
    else:  # few slots, so that they stay busy; few tokens per dispatch, since turns are short
        config.engine.update(
            num_slots=12,
            max_context=1280,
            cache_tokens=65536,
            max_cache_bytes=2**28,
            tokens_per_dispatch=3,
            compute_dtype="float32",
        )
