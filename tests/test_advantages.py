"""From trajectories to token advantages: padding, the retry mask and the choice of estimator."""

import dataclasses

import chex
import numpy as np
import pytest

from rlds_jax import advantages, grpo
from rlds_jax.rollouts.types import Trajectory, Turn

NAN = float("nan")
EPS = 1e-6
CONDITIONS = ("rlvr", "base_reflection", "rlds")


def trajectory(uid, turn_ids, reward, group="a", grades=None, pivots=None, **fields):
    turn_ids = np.array(turn_ids, np.int32)
    retry_from = fields.get("retry_from")
    return Trajectory(
        uid=uid,
        group=group,
        item_id="item",
        initial_observation="",
        tokens=np.zeros(len(turn_ids), np.int32),
        turn_ids=turn_ids,
        logprobs=np.zeros(len(turn_ids), np.float32),
        weight_version=np.zeros(len(turn_ids), np.int32),
        prompt_length=1,
        temperature=1.0,
        reward=reward,
        success=reward > 0,
        ended_by="goal",
        turns=(Turn("", ""),) * (max(turn_ids.max(), retry_from or 0) + 1),
        grades=grades,
        pivots=pivots,
        **fields,
    )


def family():
    """Originals a0, a1, a retry of a1 from turn 1, and a row of another group."""
    return [
        trajectory("a0", [-1, 0, 0, 1], 1.0, grades=(5, 1), pivots=(0, None)),
        trajectory("a1", [-1, 0, -1, 1, 1, 2], 0.0, grades=(3, 3), pivots=(1, 1)),
        trajectory(
            "a1r", [-1, 0, -1, 1, 2], 0.5, grades=(2, 4), pivots=(None, None),
            retry_from=1, parent="a1",
        ),
        trajectory("b0", [-1, 0], 1.0, group="b"),
    ]  # fmt: skip


WEIGHTS = [(0.6, 0.4)] * 4


@pytest.mark.parametrize(
    ("retry_mask", "expected"),
    [("both", [0, 1, 1, 0]), ("retry_only", [0, 0, 1, 0]), ("off", [0, 0, 0, 0])],
)
def test_retry_mask(retry_mask, expected):
    first = advantages.mask_before_turn(family(), retry_mask)
    np.testing.assert_array_equal(first, expected)
    assert first.dtype == np.int32


def test_retry_mask_does_not_depend_on_order_or_on_the_original():
    retry_first = family()[::-1]
    np.testing.assert_array_equal(advantages.mask_before_turn(retry_first), [0, 1, 1, 0])
    without_original = [t for t in family() if t.uid != "a1"]
    np.testing.assert_array_equal(advantages.mask_before_turn(without_original), [0, 1, 0])


def test_two_retries_of_one_original_mask_the_longer_prefix():
    retries = [trajectory(f"r{s}", [-1, 0, 1, 2, 3], 0.0, retry_from=s, parent="o") for s in (3, 1)]
    original = trajectory("o", [-1, 0, 1, 2, 3], 0.0)
    np.testing.assert_array_equal(advantages.mask_before_turn([original, *retries]), [3, 3, 1])


def test_unknown_retry_mask():
    with pytest.raises(ValueError, match="retry_only"):
        advantages.mask_before_turn(family(), "none")


def test_pad_rows():
    trajectories = family()[:3]
    weights = [(0.6, 0.4), (0.6, 0.4), (0.6, 0.4)]
    rows = advantages.pad_rows(trajectories, weights, advantages.AdvantageConfig())
    np.testing.assert_array_equal(rows.rewards, [1, 0, 0.5, 0])
    np.testing.assert_array_equal(rows.grades, [[5, 1], [3, 3], [2, 4], [NAN, NAN]])
    np.testing.assert_array_equal(rows.pivots, [[0, -1], [1, 1], [-1, -1], [-1, -1]])
    np.testing.assert_allclose(rows.weights, [[0.6, 0.4]] * 3 + [[0, 0]])
    np.testing.assert_array_equal(rows.group_ids, [0, 0, 0, -1])
    np.testing.assert_array_equal(rows.mask_before_turn, [0, 1, 1, 0])
    assert rows.turn_ids.shape == (4, 8)
    np.testing.assert_array_equal(rows.turn_ids[1], [-1, 0, -1, 1, 1, 2, -1, -1])
    np.testing.assert_array_equal(rows.turn_ids[3], [-1] * 8)


def test_pad_rows_of_mixed_tasks_and_missing_values():
    trajectories = [
        trajectory("a", [-1, 0], 1.0, grades=(None, 4, 2), pivots=(10**20, -5, None)),
        trajectory("b", [-1, 0], 1.0, group="b", grades=(3,), pivots=(0,)),
        trajectory("c", [-1, 0], 1.0, group="c"),
    ]
    rows = advantages.pad_rows(
        trajectories, [(0.5, 0.3, 0.2), (1.0,), ()], advantages.AdvantageConfig()
    )
    np.testing.assert_array_equal(rows.grades, [[NAN, 4, 2], [3, NAN, NAN], [NAN] * 3, [NAN] * 3])
    np.testing.assert_array_equal(
        rows.pivots, [[2**31 - 1, -1, -1], [0, -1, -1], [-1] * 3, [-1] * 3]
    )
    np.testing.assert_allclose(rows.weights, [[0.5, 0.3, 0.2], [1, 0, 0], [0] * 3, [0] * 3])
    np.testing.assert_array_equal(rows.group_ids, [0, 1, 2, -1])


def test_least_padded_size():
    config = advantages.AdvantageConfig(min_rows=6, min_tokens=20)
    rows = advantages.pad_rows(family(), WEIGHTS, config)
    assert rows.turn_ids.shape == (8, 32)


def test_rlds_by_hand():
    # r = (1, 0), (0, 0), (1/8, 3/8); means (3/8, 1/8).
    # A_ik = (5/8, -1/8), (-3/8, -1/8), (-1/4, 1/4); A_i = 13/40, -11/40, -1/20.
    # Group b is ungraded and alone: 0, outside sigma^2 = (169 + 121 + 4) / 1600 / 2 = 147/1600.
    result = advantages.estimate(family(), WEIGHTS, "rlds")
    denominator = np.sqrt(147 / 1600) + EPS
    # a0: turns 0, 0, 1; subtask 0 has pivot 0, w = 1, 1, a: m = 3 (1, 1, a) / (2 + a).
    a = np.exp(-1 / 2)
    kernel = 3 * np.array([0, 1, 1, a]) / (2 + a)
    broadcast = 0.4 * -1 / 8 * np.array([0, 1, 1, 1])
    np.testing.assert_allclose(
        result.token[0], (0.6 * 5 / 8 * kernel + broadcast) / denominator, rtol=1e-5
    )
    # The retry's own turns: 1 and 2, without pivots.
    row = -1 / 20 / denominator
    np.testing.assert_allclose(result.token[2], [0, 0, 0, row, row], rtol=1e-5)
    np.testing.assert_array_equal(result.token[3], [0, 0])
    assert result.metrics["sdae/sigma_batch"] == pytest.approx(np.sqrt(147 / 1600), rel=1e-5)
    assert result.metrics["sdae/fallback_group_rate"] == 0.5


def test_credit_is_the_advantages_by_turn_before_the_retry_mask():
    result = advantages.estimate(family(), WEIGHTS, "rlds")
    denominator = np.sqrt(147 / 1600) + EPS
    rows = [13 / 40, -11 / 40, -1 / 20, 0]
    for credit, row, scalar in zip(result.credit, rows, [1, -1, 0, 0], strict=True):
        assert credit.advantage == pytest.approx(row / denominator, abs=2e-6)
        assert credit.grpo_advantage == pytest.approx(scalar, abs=1e-5)
    assert [credit.masked_turns for credit in result.credit] == [0, 1, 1, 0]
    np.testing.assert_allclose(result.credit[0].turn_advantages, result.token[0][[1, 3]], atol=1e-6)
    # a1: turns of 1, 2, 1 tokens and pivot 1 twice; its first turn is out of the loss.
    weight = np.exp(-np.array([1, 0, 1]) / 2)
    kernel = 4 * weight / (weight @ [1, 2, 1])
    expected = (0.6 * -3 / 8 + 0.4 * -1 / 8) * kernel / denominator
    np.testing.assert_allclose(result.credit[1].turn_advantages, expected, atol=2e-6)
    assert result.token[1][1] == 0 != result.credit[1].turn_advantages[0]


@pytest.mark.parametrize("condition", ["rlvr", "base_reflection"])
def test_credit_of_grpo_is_the_same_in_every_turn(condition):
    result = advantages.estimate(family(), WEIGHTS, condition)
    for credit, turns in zip(result.credit, [2, 3, 3, 1], strict=True):
        assert credit.turn_advantages == [credit.advantage] * turns
        assert credit.advantage == credit.grpo_advantage


def test_a_turn_without_tokens_has_no_advantage():
    token, turn_ids = np.array([0, 1.5, 0, 2], np.float32), np.array([-1, 0, -1, 2])
    assert advantages.turn_advantages(token, turn_ids, 4) == [1.5, None, 2.0, None]


@pytest.mark.parametrize("condition", ["rlvr", "base_reflection"])
def test_grpo_by_hand(condition):
    # R = 1, 0, 1/2: centred 1/2, -1/2, 0; std 1/2. A group of one row gets 0.
    result = advantages.estimate(family(), WEIGHTS, condition)
    row = 0.5 / (0.5 + EPS)
    expected = [[0, row, row, row], [0, 0, 0, -row, -row, -row], [0] * 5, [0, 0]]
    for token, want in zip(result.token, expected, strict=True):
        np.testing.assert_allclose(token, want, rtol=1e-6)
    # Mean over the loss mask: 3 row - 3 row over 3 + 3 + 2 + 1 tokens.
    assert result.metrics == {
        "critic/advantages/mean": pytest.approx(0.0, abs=1e-7),
        "critic/advantages/max": pytest.approx(row),
        "critic/advantages/min": pytest.approx(-row),
    }


@pytest.mark.parametrize("condition", CONDITIONS)
def test_loss_masks(condition):
    result = advantages.estimate(family(), WEIGHTS, condition)
    expected = [[0, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1]]
    for token, mask, want in zip(result.token, result.loss_mask, expected, strict=True):
        np.testing.assert_array_equal(mask, want)
        assert token.dtype == np.float32
        assert not token[~mask].any()
    off = advantages.estimate(
        family(), WEIGHTS, condition, advantages.AdvantageConfig(retry_mask="off")
    )
    np.testing.assert_array_equal(off.loss_mask[2], [0, 1, 0, 1, 1])


def test_options_reach_the_kernel():
    def tokens(**options):
        config = advantages.AdvantageConfig(**options)
        return np.concatenate(advantages.estimate(rollouts, WEIGHTS, "rlds", config).token)

    rollouts = family()
    rollouts[1] = dataclasses.replace(rollouts[1], reward=-0.5, grades=(5, 1))
    plain = tokens()
    for options in (
        {"kernel_sigma": 3.0},
        {"min_graded_fraction": 1.5},
        {"negative_rewards": "uniform"},
        {"kernel_norm": "active"},
        {"eps": 0.1},
    ):
        assert not np.allclose(tokens(**options), plain, atol=1e-3), options


@pytest.mark.parametrize("condition", CONDITIONS)
def test_padded_size_changes_nothing(condition):
    plain = advantages.estimate(family(), WEIGHTS, condition)
    config = advantages.AdvantageConfig(min_rows=16, min_tokens=64, num_turns=16)
    padded = advantages.estimate(family(), WEIGHTS, condition, config)
    chex.assert_trees_all_close(padded, plain, atol=1e-6)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_no_trajectories(condition):
    assert advantages.estimate([], [], condition) == ([], [], [], {}, None)


def test_unknown_condition():
    with pytest.raises(ValueError, match="base_reflection"):
        advantages.estimate(family(), WEIGHTS, "ppo")


@pytest.mark.parametrize("field", ["grades", "pivots"])
def test_grades_that_do_not_match_the_subtasks_name_the_trajectory(field):
    rollouts = family()
    rollouts[1] = dataclasses.replace(rollouts[1], **{field: (3,)})
    with pytest.raises(ValueError, match=f"a1: 1 {field}"):
        advantages.estimate(rollouts, WEIGHTS, "rlds")


def test_rlds_without_subtasks_is_refused():
    with pytest.raises(ValueError, match="subtask weight"):
        advantages.estimate([trajectory("a", [-1, 0], 1.0)], [()], "rlds")


class GrpoTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_by_hand(self):
        # Group 0: R = 3, 1, 2: std 1. Group 1: equal, 0. Group 2: one row, 0. The last is padding.
        turn_ids = np.tile([-1, 0, 1], (7, 1))
        args = (
            np.array([3.0, 0.1, 1.0, 0.1, 2.0, 9.0, 50.0]),
            np.array([0, 1, 0, 1, 0, 2, -1]),
            turn_ids,
            np.array([1, 0, 0, 0, 0, 0, 0]),
        )
        output = self.variant(lambda *x: grpo.advantages(*x, num_groups=3))(*args)
        row = np.array([1, 0, -1, 0, 0, 0, 0]) / (1 + EPS)
        np.testing.assert_allclose(output.row, row, rtol=1e-6)
        unmasked = row[:, None] * [0, 1, 1]
        np.testing.assert_allclose(output.token_unmasked, unmasked, rtol=1e-6)
        unmasked[0, 1] = 0
        np.testing.assert_allclose(output.token, unmasked, rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_a_deviation_of_rounding_size_counts_as_none(self):
        # Two neighbouring float32 rewards: std 4e-8, below the floor of 1e-6.
        rewards = np.array([0.5, np.nextafter(np.float32(0.5), np.float32(1))], np.float32)
        zeros = np.zeros(2, int)
        run = self.variant(lambda *x: grpo.advantages(*x, num_groups=1))
        assert not np.any(run(rewards, zeros, zeros[:, None], zeros).row)

    def test_non_finite_reward_names_its_row(self):
        with pytest.raises(ValueError, match=r"rewards\[1\]"):
            grpo.advantages(
                np.array([0.0, NAN]), np.zeros(2, int), np.zeros((2, 1), int), np.zeros(2, int),
                num_groups=1,
            )  # fmt: skip

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_equal_rewards_give_exactly_nothing(self):
        run = self.variant(lambda *x: grpo.advantages(*x, num_groups=1))
        for reward in (0.1, 1 / 3, 0.7, 123.4):
            rewards = np.full(9, reward)
            zeros = np.zeros(9, int)
            assert not np.any(run(rewards, zeros, zeros[:, None], zeros).row)


def test_more_turns_than_expected_compile_anew():
    configs = (advantages.AdvantageConfig(num_turns=turns) for turns in (2, None))
    few, enough = (advantages.estimate(family(), WEIGHTS, "rlds", config) for config in configs)
    chex.assert_trees_all_equal(few.token, enough.token)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kernel_sigma", 0.0),
        ("kernel_sigma", float("nan")),
        ("min_graded_fraction", -0.5),
        ("negative_rewards", "drop"),
        ("kernel_norm", "none"),
        ("eps", 0.0),
        ("retry_mask", "none"),
        ("num_turns", 0),
        ("min_rows", 0),
        ("min_tokens", 0),
    ],
)
def test_bad_options_are_named_before_any_rollout(field, value):
    with pytest.raises(ValueError, match=rf"advantage\.{field} is"):
        advantages.AdvantageConfig(**{field: value})
