r"""ScienceWorld: experiments in a simulated house (METHOD section 6).

At paper scale, on 8 x H100 80 GB or a TPU v5p 2x2x2 slice:

    pip install -e '.[cuda12,scienceworld]'
    python -m rlds_jax.train --config=configs/scienceworld.py --workdir=runs/scienceworld

trains Qwen3-4B-Instruct-2507 for 400 steps of 64 prompts, 6 rollouts and up to 3 retries each, on
1796 variations of 30 tasks; 887 others validate. It needs Java 11 or later. This needs hardware it
has not been run on.

The conditions to compare with are `scienceworld.py:rlvr` and `scienceworld.py:base_reflection`.
`scienceworld.py:split_tasks` (alone or with either) trains on 17 tasks and validates on the other
13. `--config.task.options.jvms=N` bounds the simulators alive at once, and with them the episodes:
each takes up to 256 MB, and by default there are 16 per core where half of the memory holds them.

On two CPU cores, with a policy that comes with the package:

    python -m rlds_jax.train --config=configs/scienceworld.py:tiny --workdir=runs/scienceworld

plays five of the tasks in at most 8 turns; `:tiny,rlvr` and so on are the other conditions.
"""

from importlib import resources

from ml_collections import ConfigDict

from configs.common import get_common, parse_arg, section
from rlds_jax.tasks.scienceworld.task import ScienceWorld

TINY_TASKS = (
    "find-living-thing",
    "find-plant",
    "find-animal",
    "lifespan-longest-lived",
    "lifespan-shortest-lived",
)


def get_config(arg: str | None = None) -> ConfigDict:
    chosen = parse_arg(arg, variants=["split_tasks", "tiny"])
    config = get_common(chosen)
    config.steps = 400
    config.task.factory = "rlds_jax.tasks.scienceworld.task:ScienceWorld"
    config.task.options = section(ScienceWorld, split_tasks="split_tasks" in chosen)
    config.advantage.num_turns = 32
    config.rollout.update(max_prompt_tokens=8192, max_response_tokens=8192, temperature=1.0)
    # A judge reads prompt, guidance and response, and its own instructions, and answers. At worst
    # each rollout of the 64 groups, up to 10, and each of 128 auxiliary pairs fills a row.
    config.engine.max_context = 20480
    if config.engine.kind == "local":
        config.engine.num_slots = 128
    config.batch.update(rows=8, row_length=20480, max_micro=96)
    if "tiny" in chosen:
        _tiny(config)
    return config.lock()


def _tiny(config: ConfigDict) -> None:
    config.steps = 10
    config.prompts_per_step = 6
    config.task.options.update(tasks=TINY_TASKS, max_turns=8, jvms=4)
    config.advantage.num_turns = 8
    config.model.path = str(resources.files("rlds_jax") / "models" / "tiny_scienceworld")
    rlvr = config.rollout.condition == "rlvr"
    config.rollout.update(
        group_size=6 if rlvr else 4,
        retry_budget=2,
        max_prompt_tokens=160,
        max_response_tokens=512,
        max_turn_tokens=64,
        max_judge_tokens=160,
        max_guidance_tokens=96,
        temperature=0.7,
    )
    config.optimizer.learning_rate = 2e-4
    config.validation.update(every=5, num_items=60)
    config.compute.update(dtype="float32", remat="none", logprob_chunk=512)
    config.batch.update(rows=2, row_length=1024, max_micro=64)
    config.engine.update(
        num_slots=8,
        max_context=1024,
        cache_tokens=65536,
        max_cache_bytes=2**28,
        tokens_per_dispatch=3,
        compute_dtype="float32",
    )
