"""Settings say which field is wrong and what it may be."""

import pytest

from rlds_jax.rollouts.config import RolloutConfig


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"condition": "grpo"}, r"rollout.condition is 'grpo'; it must be one of"),
        ({"group_size": 0}, r"rollout.group_size is 0; it must be at least 1"),
        ({"retry_budget": -1}, "retry_budget"),
        ({"retry_fraction": 0.0}, "retry_fraction"),
        ({"retry_fraction": 1.5}, "retry_fraction"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
        ({"max_response_tokens": 0}, "max_response_tokens"),
        ({"max_turn_tokens": 0}, "max_turn_tokens is 0; it must be None or at least 1"),
        ({"max_judge_tokens": 0}, "max_judge_tokens"),
        ({"max_guidance_tokens": 0}, "max_guidance_tokens"),
        ({"max_environments": 0}, "max_environments"),
        ({"temperature": 0.0}, "rollout.temperature is 0.0; it must be above 0"),
        ({"temperature": float("inf")}, "temperature"),
        ({"grader_temperature": -1.0}, "grader_temperature"),
        ({"reflector_temperature": 0.0}, "reflector_temperature"),
        ({"env_error": "ignore"}, "env_error"),
        ({"two_pass": False}, "two_pass=False gives rlds no grades"),
        (
            {"condition": "base_reflection", "two_pass": False, "grade_retries": True},
            "grade_retries needs two_pass",
        ),
    ],
)
def test_refuses(fields, match):
    with pytest.raises(ValueError, match=match):
        RolloutConfig(**fields)


def test_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="group_sise"):
        RolloutConfig(group_sise=4)


def test_validation_plays_once_and_judges_nothing():
    config = RolloutConfig(temperature=0.9, group_size=6).validation()
    assert (config.group_size, config.temperature) == (1, 0.9)
    assert not (config.reflects)
    assert not (config.grades_originals)
    assert not (config.grades_retries)
