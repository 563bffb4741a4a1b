"""The plan of a small config, compiled for this machine's device in place of an absent one."""

import dataclasses

import jax
import pytest

from configs import frozenlake, hotpotqa
from rlds_jax import plan, sharding, topology
from rlds_jax.models import weights
from rlds_jax.models.config import QWEN3_4B

TARGET = topology.Topology("h100:1", topology.CHIPS["h100"], 1)


@pytest.fixture(scope="module")
def planned():
    config = frozenlake.get_config("tiny")
    config.update(prompts_per_step=4)
    config.compute.attention = "blockwise"
    model = weights.load_config(config.model.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "devices", lambda _: jax.devices()[:1])
        result = plan.measure(config, model, TARGET, shares=(0.4, 0.4))
    return config, result


def test_what_a_device_holds_is_counted(planned):
    _, result = planned
    count = result["parameter_count"]
    assert result["parameters"] == result["reference"] == 4 * count
    assert result["optimizer"] == pytest.approx(8 * count, abs=64)
    assert result["peak"] > result["parameters"] + result["optimizer"] + result["reference"]
    assert result["available"] == int(0.6 * TARGET.chip.memory) - plan.MARGIN
    assert result["fits"]


def test_a_step_is_bounded_by_its_slowest_part(planned):
    config, result = planned
    tokens = config.batch.rows * config.batch.row_length
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    assert result["micro_batches_per_step"] == -(-4 * 6 * longest // tokens)
    assert result["collectives_per_micro_batch"] == {}
    seconds = result["seconds_per_step"]
    assert seconds["bound"] == max(seconds["compute"], seconds["memory"], seconds["links"])
    policy, reference = result["flops_per_micro_batch"].values()
    assert policy == pytest.approx(3 * reference, rel=0.15)


@pytest.mark.parametrize(("remat", "most"), [("none", 1.02), ("full", 1.36)])
def test_the_policy_of_the_paper_computes_little_twice(remat, most):
    """Against 6 N, causal attention, and the logits that the head's backward computes again."""
    config = hotpotqa.get_config()
    config.compute.remat = remat
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    program = plan.program(config, QWEN3_4B, mesh, plan.kernel(config, TARGET.chip))
    assert program.compute.attention == "cudnn"
    tokens = config.batch.rows * config.batch.row_length
    logits = 2 * QWEN3_4B.hidden_size * QWEN3_4B.vocab_size * tokens
    work = plan.work(program)
    least = plan.useful_flops(program)
    policy = work["policy"].flops + work["policy"].attention
    assert 1 <= policy / (least + logits) <= most
    reference = work["reference"].flops + work["reference"].attention
    assert reference == pytest.approx(least / 3)


def test_the_table_names_what_was_found(planned):
    text = plan.table(planned[1])
    for part in ("peak per device", "micro-batches per step", "MFU", "compile time"):
        assert part in text


def test_advice_names_fields_and_what_they_free(planned):
    config, result = planned
    lines = "\n".join(plan.advice(result | {"fits": False}, config))
    assert "compute.remat=full" in lines
    assert "optimizer.moment_dtype=bfloat16 frees" in lines
    assert "mesh.fsdp" in lines


def test_vllm_takes_the_gpus_or_the_share_that_its_config_says():
    config = frozenlake.get_config("vllm")
    host = topology.Topology("h100:8", topology.CHIPS["h100"], 8)
    left, shares = plan.beside_engine(config, host, 0.4)
    assert (left.devices, shares) == (4, (0.0, 0.0))
    config.engine.update(placement="shared", memory_fraction=0.5)
    left, shares = plan.beside_engine(config, host, 0.4)
    assert (left.devices, shares) == (8, (0.5, pytest.approx(0.05)))
    with pytest.raises(ValueError, match=r"engine\.host_gpus"):
        plan.beside_engine(config, TARGET, 0.4)
    assert plan.beside_engine(frozenlake.get_config(), TARGET, 0.4) == (TARGET, (0.4, 0.4))


def test_less_memory_does_not_fit():
    small = dataclasses.replace(TARGET, chip=dataclasses.replace(TARGET.chip, memory=2**31))
    assert plan._available(small, 0.4) < 0
