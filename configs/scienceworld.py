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
"""

from ml_collections import ConfigDict

from configs.common import get_common, parse_arg, section
from rlds_jax.tasks.scienceworld.task import ScienceWorld


def get_config(arg: str | None = None) -> ConfigDict:
    chosen = parse_arg(arg, variants=["split_tasks"])
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
    return config.lock()
