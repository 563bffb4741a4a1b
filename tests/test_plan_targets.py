"""The paper's updates compiled for 8 x H100, and the recorded plans of all four."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import deepresearch, frozenlake, hotpotqa, scienceworld
from experiments.record import RESULTS
from rlds_jax.models.config import QWEN3_4B

ROOT = Path(__file__).parent.parent
COMPILERS = Path(sys.prefix) / "plan"  # `make test` puts them there
CONFIGS = {
    "frozenlake": frozenlake,
    "hotpotqa": hotpotqa,
    "scienceworld": scienceworld,
    "deepresearch": deepresearch,
}
GPU_CHECK = """
import jax
jax.config.update("jax_platforms", "cpu")
from experiments.gpu_check import Setting, Update
from rlds_jax import plan, topology
from rlds_jax.models.config import QWEN3_4B

target = topology.parse("h100:1")
with topology.absent(target.chip):
    made = Update(QWEN3_4B, Setting(1024, "pallas", "dots"), 2, topology.devices(target))
print(plan.peak(made.compiled))
"""


def with_compilers(*command):
    """Standard output of a Python command that finds the compilers."""
    assert COMPILERS.is_dir(), f"{COMPILERS} is missing; `make test` installs it"
    environment = os.environ | {"PYTHONPATH": f"{COMPILERS}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hotpotqa", "scienceworld"])
def test_the_update_fits_eight_h100_and_leaves_the_engine_its_share(name, tmp_path):
    """cuDNN would need its libraries to compile, so Pallas attention stands in for it."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B.to_hf()))
    flags = [f"--config=configs/{name}.py", f"--config.model.path={tmp_path}"]
    flags += ["--config.compute.attention=pallas", "--topology=h100:8", "--format=json"]
    result = json.loads(with_compilers("-m", "rlds_jax.plan", *flags))
    assert result["fits"]
    assert (result["engine_share"], result["mesh"]["fsdp"]) == (0.4, 8)
    assert result["parameter_count"] == 4_022_468_096
    recorded = next(p for p in plans() if (p["config"], p["topology"]) == (name, "h100:8"))
    assert result["peak"] == pytest.approx(recorded["peak"], rel=0.1)


@pytest.mark.slow
def test_the_gpu_check_compiles_for_an_absent_h100():
    held = 4_022_468_096 * (4 + 8 + 2)  # masters, moments, reference
    assert held < int(with_compilers("-c", GPU_CHECK)) < 2 * held


def plans():
    return json.loads((RESULTS / "plans.json").read_text())["result"]["plans"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_paper_s_updates_fit_their_gpus_and_their_slice_as_recorded(name):
    config = CONFIGS[name].get_config()
    found = [plan for plan in plans() if plan["config"] == name]
    assert {plan["topology"] for plan in found} == {"h100:8", "v5p:2x2x2"}
    assert "8 x H100 80 GB" in CONFIGS[name].__doc__
    assert "v5p 2x2x2" in CONFIGS[name].__doc__
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    rollouts = config.prompts_per_step * (config.rollout.group_size + config.rollout.retry_budget)
    tokens = config.batch.rows * config.batch.row_length
    for plan in found:
        assert plan["fits"]
        assert plan["peak"] <= 0.6 * plan["device_memory"]
        assert plan["remat"] == config.compute.remat
        assert plan["micro_batches_per_step"] == -(
            -rollouts * longest // tokens
        )  # still this config
