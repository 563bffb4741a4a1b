"""Configs: complete, locked, and every field read by something."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from configs import common, deepresearch, frozenlake, hotpotqa, scienceworld
from rlds_jax.play import make_task
from rlds_jax.rollouts.config import RolloutConfig
from rlds_jax.tasks.hotpotqa import offline
from rlds_jax.trainer import check_lengths

ROOT = Path(__file__).parent.parent
VARIANTS = (
    (frozenlake, "tiny"),
    (hotpotqa, "tiny"),
    (scienceworld, "split_tasks"),
    (scienceworld, "tiny"),
)
CONFIGS = {
    f"{module.__name__.split('.')[-1]}:{arg}": module.get_config(arg)
    for module, variant in VARIANTS
    for condition in ("", "rlvr", "base_reflection")
    for arg in (condition, f"{variant},{condition}".strip(","))
} | {
    "frozenlake:vllm": frozenlake.get_config("vllm"),
    "frozenlake:tiny,vllm": frozenlake.get_config("tiny,vllm"),
    "scienceworld:vllm": scienceworld.get_config("vllm"),
}
ITEMS = {
    "frozenlake:": (20_000, 500),
    "scienceworld:": (1796, 887),
    "scienceworld:split_tasks": (1144, 321),
    "scienceworld:tiny": (287, 141),
}


def leaves(config, prefix=""):
    for name, value in config.items():
        if hasattr(value, "items"):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def identifiers_read():
    """Every name and attribute that the package loads."""
    found = set()
    for path in (ROOT / "rlds_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_is_read(name):
    read = identifiers_read()
    unread = [leaf for leaf in leaves(CONFIGS[name]) if leaf.split(".")[-1] not in read]
    assert not unread


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_locked_and_consistent(name, monkeypatch):
    monkeypatch.setattr(offline, "prepare", lambda *_: {})
    config = CONFIGS[name]
    with pytest.raises(AttributeError):
        config.rollout.no_such_field = 1
    rollout = RolloutConfig(**config.rollout)
    check_lengths(rollout, config.engine.max_context, config.batch.row_length)
    task = make_task(config.task)
    if name.startswith("hotpotqa"):  # its items are a data set
        assert (task.train_items, task.validation_items) == (20_000, 500)
    else:
        number = ITEMS[max((start for start in ITEMS if name.startswith(start)), key=len)]
        assert (len(task.items("train")), len(task.items("validation"))) == number
    assert config.advantage.num_turns >= config.task.options.max_turns


@pytest.mark.parametrize(("module", "turns"), [(frozenlake, 10), (hotpotqa, 5)])
def test_paper_scale_is_that_of_the_method(module, turns):
    config, rlvr = module.get_config(), module.get_config("rlvr")
    assert (config.steps, config.prompts_per_step) == (312, 64)
    rollout = config.rollout
    assert (rollout.group_size, rollout.retry_budget, rlvr.rollout.group_size) == (6, 3, 10)
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (1024, 4096)
    assert (rollout.temperature, config.task.options.max_turns) == (0.7, turns)
    assert (config.optimizer.learning_rate, config.loss.kl_coefficient) == (1e-6, 1e-3)


def test_deepresearch_at_paper_scale_is_that_of_the_method_and_lacks_its_task():
    config, rlvr = deepresearch.get_config(), deepresearch.get_config("rlvr")
    assert (config.steps, config.prompts_per_step) == (315, 32)
    rollout = config.rollout
    assert (rollout.group_size, rollout.retry_budget, rlvr.rollout.group_size) == (6, 3, 8)
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (2048, 16384)
    assert (rollout.temperature, config.advantage.num_turns >= 10) == (1.0, True)
    check_lengths(RolloutConfig(**rollout), config.engine.max_context, config.batch.row_length)
    with pytest.raises(
        ValueError, match=r"tasks\.deepresearch\.task:DeepResearch' cannot be found"
    ):
        make_task(config.task)


@pytest.mark.parametrize("module", [frozenlake, hotpotqa, scienceworld, deepresearch])
def test_a_worst_step_at_paper_scale_fits_its_batch_on_eight_devices(module):
    """A row per rollout and auxiliary pair; rows that eight devices, or a TPU slice, divide."""
    for arg in ("rlds", "rlvr"):
        config = module.get_config(arg)
        assert config.batch.rows % 8 == config.batch.row_length % 512 == 0
        rollout = config.rollout
        retries = rollout.retry_budget if arg == "rlds" else 0
        rollouts = config.prompts_per_step * (rollout.group_size + retries)
        pairs = 2 * config.training.max_pairs if arg == "rlds" else 0
        longest = (
            rollout.max_prompt_tokens + rollout.max_guidance_tokens + rollout.max_response_tokens
        )
        in_a_row = config.batch.row_length // longest
        assert (rollouts + pairs) / in_a_row <= config.batch.rows * config.batch.max_micro


def test_scienceworld_at_paper_scale_is_that_of_the_method():
    config, rlvr = scienceworld.get_config(), scienceworld.get_config("rlvr")
    assert (config.steps, config.prompts_per_step) == (400, 64)
    rollout = config.rollout
    assert (rollout.group_size, rollout.retry_budget, rlvr.rollout.group_size) == (6, 3, 10)
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (8192, 8192)
    assert (rollout.temperature, config.task.options.max_turns) == (1.0, 30)
    assert config.task.options.simplification == "easy"


@pytest.mark.parametrize(
    ("get_config", "scale"),
    [
        (frozenlake.get_config, ""),
        (frozenlake.get_config, "tiny,"),
        (hotpotqa.get_config, ""),
        (hotpotqa.get_config, "tiny,"),
        (scienceworld.get_config, ""),
        (scienceworld.get_config, "split_tasks,"),
        (scienceworld.get_config, "tiny,"),
    ],
)
def test_conditions_differ_by_rollout_settings_alone(get_config, scale):
    by_condition = {c: get_config(scale + c) for c in common.CONDITIONS}
    sizes = {"rlds": by_condition["rlds"].rollout.group_size}
    for config in by_condition.values():
        fields = config.to_dict()
        sizes[fields["rollout"].pop("condition")] = fields["rollout"].pop("group_size")
        reference = by_condition["rlds"].to_dict()
        del reference["rollout"]["condition"], reference["rollout"]["group_size"]
        assert fields == reference
    assert sizes["rlds"] == sizes["base_reflection"] < sizes["rlvr"]


def test_variants_are_checked():
    with pytest.raises(ValueError, match="tinny"):
        frozenlake.get_config("tinny")
    with pytest.raises(ValueError, match="more than one"):
        frozenlake.get_config("rlvr,rlds")


def test_section_refuses_an_unknown_field():
    with pytest.raises(ValueError, match="no_such"):
        common.section(RolloutConfig, no_such=1)


def test_section_holds_the_defaults_of_its_dataclass():
    assert RolloutConfig(**common.section(RolloutConfig)) == RolloutConfig()


def test_an_optional_field_keeps_its_type():
    section = common.section(RolloutConfig)
    assert section.max_turn_tokens is None
    section.max_turn_tokens = 7
    with pytest.raises(TypeError):
        section.max_turn_tokens = "seven"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.rollout.no_such=1"], "no_such"),
        (["--config.rollout.group_size=many"], "group_size"),
        (["--config.rollout.group_size=0"], "rollout.group_size"),
        (["--config.engine.max_context=64"], "engine.max_context"),
        (["--config.prompts_per_step=99999"], "prompts_per_step"),
        (["--config.task.factory=no.such:thing"], "task.factory"),
        (["--config.model.path=/no/such/model"], "model.path"),
        (["--config.mesh.data=3"], "mesh"),
    ],
)
def test_bad_flags_are_refused_by_name_without_a_traceback(flags, message, tmp_path):
    command = [sys.executable, "-m", "rlds_jax.train", "--config=configs/frozenlake.py:tiny"]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path}", *flags], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[0] or message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_every_dataclass_field_is_in_the_config():
    config = frozenlake.get_config()
    assert set(config.rollout) == {field.name for field in dataclasses.fields(RolloutConfig)}
