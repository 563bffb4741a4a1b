r"""HotpotQA with search over Wikipedia (METHOD section 6).

At paper scale, on 8 x H100 80 GB or a TPU v5p 2x2x2 slice, with the retriever of
docs/tasks/hotpotqa.md running:

    python -m rlds_jax.train --config=configs/hotpotqa.py --workdir=runs/hotpotqa \
        --config.task.options.data_path=hotpotqa/hotpot_qa \
        --config.task.options.retriever=http://HOST:8000

trains Qwen3-4B-Instruct-2507 for 312 steps of 64 prompts, 6 rollouts and up to 3 retries each.
This needs hardware it has not been run on.

The conditions to compare with are `hotpotqa.py:rlvr` and `hotpotqa.py:base_reflection`.
"""

from ml_collections import ConfigDict

from configs.common import get_common, parse_arg, section
from rlds_jax.tasks.hotpotqa.task import HotpotQA


def get_config(arg: str | None = None) -> ConfigDict:
    config = get_common(parse_arg(arg, variants=[]))
    config.task.factory = "rlds_jax.tasks.hotpotqa.task:HotpotQA"
    config.task.options = section(HotpotQA)
    config.advantage.num_turns = 8
    return config.lock()
