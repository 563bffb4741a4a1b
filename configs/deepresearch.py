r"""DeepResearch: long reports from literature and the open web (METHOD section 6).

Sizes alone: the package has no such task yet, so `rlds_jax.train` refuses this config and names the
missing module. Its update fits 8 x H100 80 GB and a TPU v5p 2x2x2 slice, which is planned by

    python -m rlds_jax.plan --config=configs/deepresearch.py --topology=h100:8
    python -m rlds_jax.plan --config=configs/deepresearch.py --topology=v5p:2x2x2

315 steps of 32 prompts, 6 rollouts and up to 3 retries each; `deepresearch.py:rlvr` and
`deepresearch.py:base_reflection` are the conditions to compare with.
"""

from ml_collections import ConfigDict

from configs.common import get_common, parse_arg


def get_config(arg: str | None = None) -> ConfigDict:
    config = get_common(parse_arg(arg, variants=[]))
    config.steps = 315
    config.prompts_per_step = 32
    config.task.factory = "rlds_jax.tasks.deepresearch.task:DeepResearch"
    config.advantage.num_turns = 16
    config.rollout.update(max_prompt_tokens=2048, max_response_tokens=16384, temperature=1.0)
    if config.rollout.condition == "rlvr":
        config.rollout.group_size = 8
    # A judge reads prompt, guidance and response, and its own instructions, and answers. At worst
    # each rollout of the 32 groups, up to 9, and each of 128 auxiliary pairs fills a row.
    config.engine.max_context = 22528
    if config.engine.kind == "local":
        config.engine.num_slots = 128
    config.batch.update(rows=8, row_length=22528, max_micro=64)
    return config.lock()
