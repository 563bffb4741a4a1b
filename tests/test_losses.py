"""Losses on small arrays worked by hand, and gradients that stay finite whatever is masked."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from rlds_jax import losses

OFF = losses.LossConfig(kl="off", importance_cap=None)


def fields(advantage, policy_weight, **others):
    zeros = np.zeros_like(np.asarray(advantage, np.float32))
    values = {
        "advantage": advantage,
        "policy_weight": policy_weight,
        "kl_weight": zeros,
        "nll_weight": zeros,
        "behaviour_logprobs": zeros,
        "old_logprobs": zeros,
    } | others
    return losses.TokenFields(
        **{k: None if v is None else jnp.asarray(v, jnp.float32) for k, v in values.items()}
    )


def array(*values):
    return jnp.asarray(values, jnp.float32)


class PerTokenTest(chex.TestCase, parameterized.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_clipped_surrogate(self):
        # ratio:      2 (A>0)  0.5 (A>0)  0.5 (A<0)  2 (A<0)  8 (A<0)  1.1 (A<0)
        ratio = np.array([2.0, 0.5, 0.5, 2.0, 8.0, 1.1])
        advantage = array(1.0, 1.0, -1.0, -1.0, -1.0, -2.0)

        def surrogate(logprobs, advantage):
            return losses.clipped_surrogate(
                logprobs,
                jnp.zeros_like(logprobs),
                advantage,
                clip_low=0.2,
                clip_high=0.3,
                dual_clip=3.0,
            )

        logprobs = jnp.asarray(np.log(ratio), jnp.float32)
        term = self.variant(surrogate)(logprobs, advantage)
        # Clipped high at 1.3; free; clipped low at 0.8; free; dual bound 3; free.
        np.testing.assert_allclose(term.loss, [-1.3, -0.5, 0.8, 2.0, 3.0, 2.2], rtol=1e-6)
        np.testing.assert_array_equal(term.clipped_high, [1, 0, 0, 0, 0, 0])
        np.testing.assert_array_equal(term.clipped_low, [0, 0, 1, 0, 0, 0])
        np.testing.assert_array_equal(term.clipped_dual, [0, 0, 0, 0, 1, 0])
        gradient = jax.grad(lambda x: surrogate(x, advantage).loss.sum())(logprobs)
        # -A ratio where the ratio is free, 0 where a bound holds.
        np.testing.assert_allclose(gradient, [0.0, -0.5, 0.0, 2.0, 0.0, 2.2], rtol=1e-6)

    def test_without_dual_clip_the_loss_is_unbounded(self):
        term = losses.clipped_surrogate(
            array(np.log(8.0)), array(0.0), array(-1.0), clip_low=0.2, clip_high=0.3, dual_clip=None
        )
        np.testing.assert_allclose(term.loss, [8.0], rtol=1e-6)
        assert not term.clipped_dual.any()

    def test_at_equal_policies_the_gradient_is_the_policy_gradient(self):
        gradient = jax.grad(
            lambda x: losses.clipped_surrogate(
                x, array(-1.0, -2.0), array(0.7, -0.3), clip_low=0.28, clip_high=0.28, dual_clip=3.0
            ).loss.sum()
        )(array(-1.0, -2.0))
        np.testing.assert_allclose(gradient, [-0.7, 0.3], rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    @parameterized.parameters(
        # d = ref - logp = log 2 and -1.
        ("k1", [-np.log(2), 1.0], [1.0, 1.0]),
        ("k2", [np.log(2) ** 2 / 2, 0.5], [-np.log(2), 1.0]),
        ("k3", [2 - np.log(2) - 1, np.exp(-1)], [1 - 2.0, 1 - np.exp(-1)]),
    )
    def test_kl(self, estimator, expected, gradient):
        policy, reference = array(-2.0, -1.0), array(-2.0 + np.log(2), -2.0)

        def kl(x):
            return losses.kl_divergence(x, reference, estimator)

        np.testing.assert_allclose(self.variant(kl)(policy), expected, rtol=1e-6)
        np.testing.assert_allclose(jax.grad(lambda x: kl(x).sum())(policy), gradient, rtol=1e-6)

    def test_k3_is_bounded(self):
        kl = losses.kl_divergence(array(0.0, 0.0), array(200.0, -200.0), "k3")
        np.testing.assert_allclose(kl, [10.0, 10.0])

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_importance_weight_is_truncated(self):
        weight = self.variant(lambda old, new: losses.importance_weight(old, new, 2.0))(
            array(-1.0, -1.0, -1.0), array(-1.0, -1.0 + np.log(2), -200.0)
        )
        np.testing.assert_allclose(weight, [1.0, 0.5, 2.0], rtol=1e-6)

    def test_importance_weight_has_no_gradient(self):
        gradient = jax.grad(lambda x: losses.importance_weight(x, array(-1.0), 2.0).sum())
        np.testing.assert_array_equal(gradient(array(-1.2)), [0.0])


class TotalTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_by_hand(self):
        # Two policy tokens (weight 1/2 each), one NLL token (weight 0.1), one of neither.
        config = losses.LossConfig(
            kl="k2", kl_coefficient=0.1, entropy_coefficient=0.01, importance_cap=2.0
        )
        batch = fields(
            [1.0, -1.0, 0.0, 0.0],
            [0.5, 0.5, 0.0, 0.0],
            kl_weight=[0.5, 0.5, 0.0, 0.0],
            nll_weight=[0.0, 0.0, 0.1, 0.0],
            old_logprobs=[-1.0, -1.0, 0.0, 0.0],
            behaviour_logprobs=[-1.0 + np.log(2), -3.0, 0.0, 0.0],
        )
        loss, sums = self.variant(lambda *args: losses.total(*args, config))(
            array(-1.0, -1.0, -4.0, -9.0), array(1.0, 3.0, 5.0, 7.0), array(-1, -3, 0, 0), batch
        )
        # Importance 1/2 and min(e^2, 2) = 2; ratio 1: (1/2)(1/2)(-1) + (1/2)(2)(1) = 3/4.
        # KL: (1/2)(0) + (1/2)(2^2 / 2) = 1. Entropy (1 + 3) / 2 = 2. NLL 0.1 * 4 = 0.4.
        np.testing.assert_allclose(loss, 0.75 + 0.1 * 1 - 0.01 * 2 + 0.4, rtol=1e-6)
        metrics = losses.summarise(sums)
        expected = {
            "actor/pg_loss": 0.75,
            "actor/kl_loss": 1.0,
            "actor/entropy": 2.0,
            "actor/nll_loss": 0.4,
            "actor/ratio_mean": 1.0,
            "actor/ppo_kl": 0.0,
            "rollout_corr/rollout_is_mean": 1.25,
            "rollout_corr/rollout_is_truncated": 0.5,
            "rollout_corr/kl": (np.log(2) - 2) / 2,
            "rollout_corr/logprob_diff_mean": (np.log(2) + 2) / 2,
            "rollout_corr/logprob_diff_max": 2.0,
        }
        assert {k: metrics[k] for k in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)

    def test_statistics_combine_over_micro_batches(self):
        rng = np.random.default_rng(0)
        old = rng.normal(-2, 1, (4, 6)).astype(np.float32)
        current = (old + rng.normal(0, 0.5, old.shape)).astype(np.float32)
        behaviour = (old + rng.normal(0, 0.1, old.shape)).astype(np.float32)
        batch = fields(
            rng.normal(size=old.shape),
            np.full(old.shape, 1 / old.size),
            old_logprobs=old,
            behaviour_logprobs=behaviour,
        )
        config = losses.LossConfig(kl="off", clip_low=0.2, clip_high=0.4)

        def part(rows):
            part_fields = losses.TokenFields(*(x[rows] for x in batch))
            return losses.total(jnp.asarray(current[rows]), jnp.zeros_like(old[rows]), None,
                                part_fields, config)  # fmt: skip

        (loss_a, sums_a), (loss_b, sums_b) = part(slice(0, 1)), part(slice(1, 4))
        loss, sums = part(slice(0, 4))
        np.testing.assert_allclose(loss_a + loss_b, loss, rtol=1e-5)
        metrics = losses.summarise(sums_a.combine(sums_b))
        assert metrics == pytest.approx(losses.summarise(sums), rel=1e-4)
        ratio, advantage = np.exp(current - old), np.asarray(batch.advantage)
        difference = old - behaviour
        expected = {
            "actor/pg_clipfrac_low": np.mean((advantage < 0) & (ratio < 0.8)),
            "actor/pg_clipfrac_high": np.mean((advantage > 0) & (ratio > 1.4)),
            "actor/ppo_kl": np.mean(old - current),
            "actor/ratio_mean": ratio.mean(),
            "actor/ratio_max": ratio.max(),
            "rollout_corr/kl": -difference.mean(),
            "rollout_corr/logprob_diff_mean": np.abs(difference).mean(),
            "rollout_corr/logprob_diff_max": np.abs(difference).max(),
            "rollout_corr/logprob_pearson_corr": np.corrcoef(old.ravel(), behaviour.ravel())[0, 1],
        }
        assert min(expected["actor/pg_clipfrac_low"], expected["actor/pg_clipfrac_high"]) > 0
        assert {k: metrics[k] for k in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)

    def test_without_old_logprobs_the_ratio_is_one(self):
        batch = fields([2.0, 3.0], [0.5, 0.5], old_logprobs=None)
        value, gradient = jax.value_and_grad(
            lambda x: losses.total(x, jnp.zeros(2), None, batch, OFF)[0]
        )(array(-5.0, -0.1))
        np.testing.assert_allclose(value, -2.5)
        np.testing.assert_allclose(gradient, [-1.0, -1.5])

    def test_correlation_is_absent_without_spread(self):
        batch = fields([1.0, 1.0], [0.5, 0.5], behaviour_logprobs=[-0.7, -0.7])
        _, sums = losses.total(array(-1.0, -2.0), jnp.zeros(2), None, batch, OFF)
        assert "rollout_corr/logprob_pearson_corr" not in losses.summarise(sums)

    def test_no_policy_token_gives_zero_and_loss_terms_only(self):
        batch = fields([1.0, 1.0], [0.0, 0.0])
        loss, sums = losses.total(array(-1.0, -2.0), jnp.zeros(2), None, batch, OFF)
        assert loss == 0
        assert losses.summarise(sums) == {
            "actor/pg_loss": 0.0,
            "actor/entropy": 0.0,
            "actor/nll_loss": 0.0,
        }

    def test_missing_reference_is_an_error(self):
        with pytest.raises(ValueError, match="reference_logprobs"):
            losses.total(array(-1.0), array(0.0), None, fields([1.0], [1.0]), losses.LossConfig())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [3.0, None])
def test_gradients_are_finite_at_log_ratio_200(estimator, log_ratio, advantage, dual_clip):
    config = losses.LossConfig(kl=estimator, dual_clip=dual_clip)
    old = -201.0 if log_ratio > 0 else -1.0
    batch = fields(
        [advantage],
        [1.0],
        kl_weight=[1.0],
        old_logprobs=[old],
        behaviour_logprobs=[old - log_ratio],
    )
    value, gradient = jax.value_and_grad(
        lambda x: losses.total(x, array(0.0), array(old), batch, config)[0]
    )(array(old + log_ratio))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_garbage_at_masked_positions_changes_nothing(garbage):
    config = losses.LossConfig(entropy_coefficient=0.1)
    clean = {
        "advantage": [1.0, 0.0, 0.0],
        "policy_weight": [0.5, 0.0, 0.0],
        "kl_weight": [0.5, 0.0, 0.0],
        "nll_weight": [0.0, 0.3, 0.0],
        "old_logprobs": [-1.2, 0.0, 0.0],
        "behaviour_logprobs": [-1.1, 0.0, 0.0],
    }
    dirty = clean | {
        name: [clean[name][0], garbage, garbage]
        for name in ("advantage", "old_logprobs", "behaviour_logprobs")
    }

    def evaluate(values, logprobs, entropy, reference):
        def loss(x, h):
            return losses.total(x, h, reference, fields(**values), config)

        (value, sums), gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            logprobs, entropy
        )
        return value, sums, gradient

    expected = evaluate(clean, array(-1.0, -2.0, 0.0), array(1.0, 0.0, 0.0), array(-1.5, 0.0, 0.0))
    actual = evaluate(
        dirty,
        array(-1.0, -2.0, garbage),
        array(1.0, garbage, garbage),
        array(-1.5, garbage, garbage),
    )
    chex.assert_trees_all_equal(actual, expected)
    chex.assert_tree_all_finite(actual)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Sequences of 1, 3 and 0 active tokens with losses 6; 1, 2, 3.
        ("token-mean", (6 + 1 + 2 + 3) / 4),
        ("seq-mean-token-mean", (6 + (1 + 2 + 3) / 3) / 2),
        ("seq-mean-token-sum", (6 + (1 + 2 + 3)) / 2),
    ],
)
def test_token_weights(aggregation, expected):
    masks = [np.array(x, bool) for x in ([0, 1], [1, 1, 0, 1], [0, 0])]
    values = [np.array(x) for x in ([9, 6], [1, 2, 9, 3], [9, 9])]
    counts = losses.count_tokens(masks)
    assert counts == losses.TokenCounts(tokens=4, sequences=2)
    weights = [losses.token_weights(mask, aggregation, counts) for mask in masks]
    assert all(w.dtype == np.float32 for w in weights)
    total = sum((w * v).sum() for w, v in zip(weights, values, strict=True))
    assert total == pytest.approx(expected)


def test_unknown_aggregation_is_an_error():
    with pytest.raises(ValueError, match="seq-mean-token-sum"):
        losses.token_weights(np.ones(2, bool), "mean", losses.TokenCounts(2, 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_low", 1.5),
        ("clip_high", -0.1),
        ("dual_clip", 1.0),
        ("importance_cap", 0.0),
        ("kl", "k4"),
        ("clip_high", float("nan")),
        ("dual_clip", float("nan")),
        ("importance_cap", float("nan")),
        ("kl_coefficient", -1.0),
        ("kl_coefficient", float("nan")),
        ("entropy_coefficient", float("inf")),
    ],
)
def test_config_names_the_field_out_of_range(field, value):
    with pytest.raises(ValueError, match=field):
        losses.LossConfig(**{field: value})


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, True), ({"kl": "off"}, False), ({"kl_coefficient": 0.0}, False)],
)
def test_reference_is_needed_only_when_it_enters(options, expected):
    assert losses.LossConfig(**options).needs_reference is expected
