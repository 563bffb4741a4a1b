"""Validation: fixed items and seeds, and honest intervals."""

import asyncio
import math

import numpy as np
import pytest

from configs import frozenlake
from rlds_jax.tasks.frozenlake import FrozenLake
from rlds_jax.trainer import Trainer
from rlds_jax.validation import (
    Interval,
    ValidationConfig,
    bootstrap_mean,
    validate,
    validation_items,
)


@pytest.mark.parametrize("field", [{"every": -1}, {"seed": -1}, {"resamples": 0}, {"num_items": 0}])
def test_a_field_out_of_range_is_named(field):
    with pytest.raises(ValueError, match=rf"validation\.{next(iter(field))}"):
        ValidationConfig(**field)


def test_more_items_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"validation\.num_items is 501.*has 500"):
        validation_items(FrozenLake(), ValidationConfig(num_items=501))


def test_due_before_training_every_n_steps_and_at_the_end():
    due = ValidationConfig(every=3).due
    assert [step for step in range(9) if due(step, 8)] == [0, 3, 6, 8]
    assert not any(ValidationConfig(every=0).due(step, 8) for step in range(9))


def test_interval_of_a_bernoulli_sample():
    """180 of 500: the normal approximation gives 0.36 +- 1.96 sqrt(0.36 0.64 / 500) = 0.042."""
    mean, low, high, n = bootstrap_mean([1.0] * 180 + [0.0] * 320)
    assert (mean, n) == (0.36, 500)
    half = 1.96 * math.sqrt(0.36 * 0.64 / 500)
    assert low == pytest.approx(0.36 - half, abs=0.006)
    assert high == pytest.approx(0.36 + half, abs=0.006)


def test_equal_values_have_no_width_and_no_values_are_refused():
    assert bootstrap_mean([0.5] * 4) == Interval(0.5, 0.5, 0.5, 4)
    assert bootstrap_mean([1.0]) == Interval(1.0, 1.0, 1.0, 1)
    with pytest.raises(ValueError, match="no values"):
        bootstrap_mean([])


def test_validations_of_one_policy_are_equal_and_leave_training_as_it_was(tmp_path):
    """Whatever the run's seed: the same items draw the same randomness."""
    config = frozenlake.get_config("tiny")
    config.validation.num_items = 8
    outcomes = []
    for seed in (0, 1):
        config.seed = seed
        trainer = Trainer(config, tmp_path / str(seed))
        try:
            outcomes += [
                asyncio.run(validate(trainer.context, trainer.validation_items, trainer.validation))
                for _ in range(2)
            ]
        finally:
            trainer.close()
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert list(outcomes[0].rewards) == [f"validation-{i}" for i in range(8)]
    assert outcomes[0].reward.mean == np.mean(list(outcomes[0].rewards.values()))
    assert outcomes[0].dropped == 0
