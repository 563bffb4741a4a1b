r"""HotpotQA with search over Wikipedia (METHOD section 6).

At paper scale, on 8 x H100 80 GB or a TPU v5p 2x2x2 slice, with the retriever of
docs/tasks/hotpotqa.md running:

    python -m rlds_jax.train --config=configs/hotpotqa.py --workdir=runs/hotpotqa \
        --config.task.options.data_path=hotpotqa/hotpot_qa \
        --config.task.options.retriever=http://HOST:8000

trains Qwen3-4B-Instruct-2507 for 312 steps of 64 prompts, 6 rollouts and up to 3 retries each.
This needs hardware it has not been run on.

On two CPU cores, with a small encyclopedia and the policy that comes with the package:

    python -m rlds_jax.train --config=configs/hotpotqa.py:tiny --workdir=runs/hotpotqa

The first run makes the encyclopedia's index, which takes some minutes.

The conditions to compare with are `hotpotqa.py:rlvr` and `hotpotqa.py:base_reflection`, and
`hotpotqa.py:tiny,rlvr` and so on at small scale.
"""

from importlib import resources

from ml_collections import ConfigDict

from configs.common import get_common, parse_arg, section
from rlds_jax.tasks.hotpotqa.task import HotpotQA


def get_config(arg: str | None = None) -> ConfigDict:
    chosen = parse_arg(arg, variants=["tiny"])
    config = get_common(chosen)
    config.task.factory = "rlds_jax.tasks.hotpotqa.task:HotpotQA"
    config.task.options = section(HotpotQA)
    config.advantage.num_turns = 8
    if "tiny" in chosen:
        _tiny(config)
    return config.lock()


def _tiny(config: ConfigDict) -> None:
    config.steps = 20
    config.prompts_per_step = 8
    config.task.factory = "rlds_jax.tasks.hotpotqa.offline:offline"
    del config.task.options.data_path, config.task.options.retriever
    config.task.options.update(directory="", passages=2000, result_chars=160, call_chars=400)
    config.model.path = str(resources.files("rlds_jax") / "models" / "tiny_hotpotqa")
    rlvr = config.rollout.condition == "rlvr"
    config.rollout.update(
        group_size=6 if rlvr else 4,
        retry_budget=2,
        max_prompt_tokens=256,
        max_response_tokens=768,
        max_turn_tokens=96,
        max_judge_tokens=256,
        max_guidance_tokens=128,
    )
    config.optimizer.learning_rate = 1e-4
    config.validation.every = 10
    config.compute.update(dtype="float32", remat="none", logprob_chunk=512)
    config.batch.update(rows=2, row_length=1536, max_micro=64)
    # Few slots, so that they stay busy; few tokens per dispatch, since turns are short.
    config.engine.update(
        num_slots=12,
        max_context=1536,
        cache_tokens=49152,
        max_cache_bytes=2**28,
        tokens_per_dispatch=3,
        compute_dtype="float32",
    )
