"""The real sidecar, which forgets a part of its update while a file in $RLDS_TEST_FAULTS says so.

keep_prefixes: the prefix cache is not emptied. keep_head: a tied head keeps its packed copy.
"""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "rlds_jax" / "rollouts" / "engines" / "vllm_sidecar"))
import serve  # noqa: E402
import transfer  # noqa: E402

FAULTS = Path(os.environ["RLDS_TEST_FAULTS"])
forget, repack = serve.Sidecar.forget_prefixes, transfer.repack_tied_heads


async def forget_unless_told(self):
    return True if (FAULTS / "keep_prefixes").exists() else await forget(self)


def repack_unless_told(model):
    if not (FAULTS / "keep_head").exists():
        repack(model)


serve.Sidecar.forget_prefixes = forget_unless_told
transfer.repack_tied_heads = repack_unless_told

if __name__ == "__main__":
    serve.main()
elif __name__ == "__mp_main__":
    serve.register_transfers()
