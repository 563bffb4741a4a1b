"""Token-level losses (METHOD section 3).

Every per-token function takes arrays of one common shape and returns arrays of that shape. `total`
turns them into one scalar: a plain sum weighted by per-token weights that already hold every
global count (`token_weights`), so packing, padding and micro-batching cannot change the gradient.

Positions of weight zero may hold anything, NaN included: `total` replaces their inputs before any
arithmetic, since a mask applied after an exp leaves NaN gradients behind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np

LOG_RATIO_CLIP = 20.0
KL_CLIP = 10.0

KLEstimator = Literal["k1", "k2", "k3", "off"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Options of the loss; the defaults are METHOD section 3.

    Attributes:
      clip_low, clip_high: the importance ratio is clipped to [1 - clip_low, 1 + clip_high].
      dual_clip: for negative advantages the loss is at most dual_clip * |A|; None for no bound.
      importance_cap: truncated importance sampling: the policy term of a token is multiplied by
        min(pi_old / pi_behaviour, importance_cap); None leaves the term alone.
      kl: estimator of the divergence from the reference policy.
      kl_coefficient: its weight in the loss.
      entropy_coefficient: weight of the entropy bonus.

    Raises:
      ValueError: naming the field that is out of range.
    """

    clip_low: float = 0.28
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    importance_cap: float | None = 2.0
    kl: KLEstimator = "k3"
    kl_coefficient: float = 0.001
    entropy_coefficient: float = 0.0

    def __post_init__(self):
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low is {self.clip_low}; it must be in [0, 1]")
        if not self.clip_high >= 0:
            raise ValueError(f"clip_high is {self.clip_high}; it must not be negative")
        if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
            raise ValueError(
                f"dual_clip is {self.dual_clip}; it must exceed 1 + clip_high, or be None for off"
            )
        if self.importance_cap is not None and not self.importance_cap > 0:
            raise ValueError(
                f"importance_cap is {self.importance_cap}; it must be positive, or None for off"
            )
        if self.kl not in get_args(KLEstimator):
            raise ValueError(f"kl is {self.kl!r}; use one of {', '.join(get_args(KLEstimator))}")
        if not 0 <= self.kl_coefficient < math.inf:
            raise ValueError(
                f"kl_coefficient is {self.kl_coefficient}; it must be finite and not negative"
            )
        if not math.isfinite(self.entropy_coefficient):
            raise ValueError(f"entropy_coefficient is {self.entropy_coefficient}; not finite")

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy enters the loss, and so has to be kept."""
        return self.kl != "off" and self.kl_coefficient > 0


class TokenFields(NamedTuple):
    """What the batch holds per token, each of one shape S, float32.

    Attributes:
      advantage: advantage of the token.
      policy_weight: weight in the policy loss, the entropy and the statistics; 0 = not a policy
        token. See `token_weights`.
      kl_weight: weight in the KL term, without the coefficient.
      nll_weight: weight in the auxiliary NLL, channel coefficient and delta included.
      behaviour_logprobs: log-probability under the policy that sampled the token.
      old_logprobs: log-probability under the trainer's policy at the start of the step; None when
        there is one update per batch, where it equals the current one.
    """

    advantage: chex.Array
    policy_weight: chex.Array
    kl_weight: chex.Array
    nll_weight: chex.Array
    behaviour_logprobs: chex.Array
    old_logprobs: chex.Array | None = None


class LossSums(NamedTuple):
    """Statistics of a micro-batch: `totals` combine by addition, `maxima` by maximum."""

    totals: dict[str, chex.Array]
    maxima: dict[str, chex.Array]

    def combine(self, other: LossSums) -> LossSums:
        """The statistics of both micro-batches together."""
        return LossSums(
            jax.tree.map(jnp.add, self.totals, other.totals),
            jax.tree.map(jnp.maximum, self.maxima, other.maxima),
        )


class PolicyTerm(NamedTuple):
    """Per-token clipped surrogate, and which bound was active where (bool)."""

    loss: chex.Array
    ratio: chex.Array
    clipped_low: chex.Array
    clipped_high: chex.Array
    clipped_dual: chex.Array


def clipped_surrogate(
    logprobs: chex.Array,
    old_logprobs: chex.Array,
    advantage: chex.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyTerm:
    """Computes the PPO loss with separate clips and an optional dual clip (METHOD section 3).

    Let r be exp(clip(logprobs - old_logprobs, -20, 20)). The loss is
    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and at most -A dual_clip where A < 0.

    Args:
      logprobs: log-probabilities under the current policy, shape S.
      old_logprobs: log-probabilities under the policy of the start of the step, shape S.
      advantage: advantages, shape S.
      clip_low: width of the clip below one.
      clip_high: width of the clip above one.
      dual_clip: bound on the loss in units of |A| for negative A, or None.

    Returns:
      `PolicyTerm` of arrays of shape S. The gradient flows through `logprobs` alone.
    """
    chex.assert_equal_shape([logprobs, old_logprobs, advantage])
    chex.assert_type([logprobs, old_logprobs, advantage], float)
    old_logprobs, advantage = jax.lax.stop_gradient((old_logprobs, advantage))
    ratio = jnp.exp(jnp.clip(logprobs - old_logprobs, -LOG_RATIO_CLIP, LOG_RATIO_CLIP))
    unclipped = -advantage * ratio
    clipped = -advantage * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(unclipped, clipped)
    active = clipped > unclipped
    dual = jnp.zeros_like(active)
    if dual_clip is not None:
        bound = -advantage * dual_clip
        dual = (advantage < 0) & (loss > bound)
        loss = jnp.where(dual, bound, loss)
    return PolicyTerm(loss, ratio, active & (ratio < 1), active & (ratio > 1), dual)


def importance_weight(
    old_logprobs: chex.Array, behaviour_logprobs: chex.Array, cap: float
) -> chex.Array:
    """Computes min(pi_old / pi_behaviour, cap) per token, without gradient (METHOD section 3).

    Args:
      old_logprobs: log-probabilities under the trainer's policy, shape S.
      behaviour_logprobs: log-probabilities the sampler reported, shape S.
      cap: the truncation.

    Returns:
      Weights of shape S in (0, cap].
    """
    chex.assert_equal_shape([old_logprobs, behaviour_logprobs])
    log_ratio = jnp.clip(old_logprobs - behaviour_logprobs, -LOG_RATIO_CLIP, LOG_RATIO_CLIP)
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), cap))


def kl_divergence(
    logprobs: chex.Array, reference_logprobs: chex.Array, estimator: KLEstimator
) -> chex.Array:
    """Estimates KL(policy || reference) per sampled token (METHOD section 3).

    With d = reference_logprobs - logprobs: k1 is -d, k2 is d^2 / 2, and k3 is exp(d) - d - 1 with
    d clipped to [-20, 20] before the exp and the result to [-10, 10].

    Args:
      logprobs: log-probabilities under the current policy, shape S.
      reference_logprobs: log-probabilities under the frozen reference, shape S.
      estimator: "k1", "k2" or "k3".

    Returns:
      The estimate, shape S, in nats.

    Raises:
      ValueError: `estimator` is none of these.
    """
    chex.assert_equal_shape([logprobs, reference_logprobs])
    difference = jax.lax.stop_gradient(reference_logprobs) - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    if estimator == "k3":
        difference = jnp.clip(difference, -LOG_RATIO_CLIP, LOG_RATIO_CLIP)
        return jnp.clip(jnp.exp(difference) - difference - 1, -KL_CLIP, KL_CLIP)
    raise ValueError(f"kl estimator is {estimator!r}; use k1, k2 or k3")


def total(
    logprobs: chex.Array,
    entropy: chex.Array,
    reference_logprobs: chex.Array | None,
    fields: TokenFields,
    config: LossConfig,
) -> tuple[chex.Array, LossSums]:
    """Computes L_PPO + kl_coefficient KL - entropy_coefficient H + L_aux (METHOD section 3).

    Args:
      logprobs: log-probabilities under the current policy, at each token's own temperature,
        shape S. The only argument besides `entropy` that the gradient flows through.
      entropy: entropy of the current policy at each token, shape S.
      reference_logprobs: log-probabilities under the reference, shape S; None where
        `config.needs_reference` is false.
      fields: `TokenFields` of shape S.
      config: the options.

    Returns:
      The scalar loss of these tokens: the loss of a batch is the sum over its micro-batches.
      The statistics behind `summarise`, to be combined over micro-batches.

    Raises:
      ValueError: the reference's log-probabilities are missing.
    """
    chex.assert_equal_shape([logprobs, entropy, *(x for x in fields if x is not None)])
    chex.assert_type(logprobs, float)
    policy, behaviour, old = _policy_inputs(logprobs, fields)
    active = fields.policy_weight > 0
    term = clipped_surrogate(
        policy,
        old,
        jnp.where(active, fields.advantage, 0.0),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    importance = jnp.ones_like(policy)
    if config.importance_cap is not None:
        importance = importance_weight(old, behaviour, config.importance_cap)
    nll_active = fields.nll_weight > 0
    terms = {
        "policy_loss": jnp.sum(fields.policy_weight * importance * term.loss),
        "entropy": jnp.sum(fields.policy_weight * jnp.where(active, entropy, 0.0)),
        "nll_loss": jnp.sum(fields.nll_weight * -jnp.where(nll_active, logprobs, 0.0)),
    }
    loss = terms["policy_loss"] + terms["nll_loss"]
    if config.entropy_coefficient:
        loss -= config.entropy_coefficient * terms["entropy"]
    if config.needs_reference:
        if reference_logprobs is None:
            raise ValueError("reference_logprobs is None; pass them, or set kl to 'off'")
        kl_active = fields.kl_weight > 0
        kl = kl_divergence(
            jnp.where(kl_active, logprobs, 0.0),
            jnp.where(kl_active, reference_logprobs, 0.0),
            config.kl,
        )
        terms["kl_loss"] = jnp.sum(fields.kl_weight * kl)
        loss += config.kl_coefficient * terms["kl_loss"]
    statistics = _statistics(term, importance, policy, old, behaviour, active, config)
    sums = LossSums({**terms, **statistics.totals}, statistics.maxima)
    return loss, jax.lax.stop_gradient(sums)


def _policy_inputs(
    logprobs: chex.Array, fields: TokenFields
) -> tuple[chex.Array, chex.Array, chex.Array]:
    """Current, behaviour and old log-probabilities, all 0 where the token is no policy token."""
    active = fields.policy_weight > 0
    policy = jnp.where(active, logprobs, 0.0)
    behaviour = jnp.where(active, fields.behaviour_logprobs, 0.0)
    if fields.old_logprobs is None:
        return policy, behaviour, jax.lax.stop_gradient(policy)
    return policy, behaviour, jnp.where(active, fields.old_logprobs, 0.0)


def _statistics(
    term: PolicyTerm,
    importance: chex.Array,
    policy: chex.Array,
    old: chex.Array,
    behaviour: chex.Array,
    active: chex.Array,
    config: LossConfig,
) -> LossSums:
    """Unweighted sums over the policy tokens; every input is already 0 at other positions."""
    difference = old - behaviour
    cap = jnp.inf if config.importance_cap is None else config.importance_cap
    per_token = {
        "tokens": active,
        "ratio": term.ratio,
        "clipped_low": term.clipped_low,
        "clipped_high": term.clipped_high,
        "clipped_dual": term.clipped_dual,
        "old_minus_current": old - policy,
        "importance": importance,
        "truncated": importance >= cap,
        "difference": difference,
        "absolute_difference": jnp.abs(difference),
        "old": old,
        "behaviour": behaviour,
        "old_squared": jnp.square(old),
        "behaviour_squared": jnp.square(behaviour),
        "old_behaviour": old * behaviour,
    }
    maxima = {"ratio": term.ratio, "absolute_difference": jnp.abs(difference)}

    def reduce(x: chex.Array, reduction) -> chex.Array:
        return reduction(jnp.where(active, x, 0).astype(jnp.float32))

    return LossSums(
        {name: reduce(x, jnp.sum) for name, x in per_token.items()},
        {name: reduce(x, jnp.max) for name, x in maxima.items()},
    )


def summarise(sums: LossSums) -> dict[str, float]:
    """Turns the statistics of a whole batch into metrics, on the host.

    `actor/pg_clipfrac_low` and `_high` are the shares of tokens whose ratio was clipped from below
    and above; `_lower` is the share on which the dual clip acted. `rollout_corr/kl` is the k1
    estimate of KL(sampler || trainer), and the log-probability differences are the trainer's less
    the sampler's.

    Returns:
      Metrics by name. Without policy tokens only the loss terms; without spread in the
      log-probabilities no correlation.
    """
    totals = {name: float(x) for name, x in sums.totals.items()}
    metrics = {
        "actor/pg_loss": totals["policy_loss"],
        "actor/entropy": totals["entropy"],
        "actor/nll_loss": totals["nll_loss"],
    }
    if "kl_loss" in totals:
        metrics["actor/kl_loss"] = totals["kl_loss"]
    count = totals["tokens"]
    if count == 0:
        return metrics
    low, high = totals["clipped_low"] / count, totals["clipped_high"] / count
    metrics |= {
        "actor/pg_clipfrac": low + high,
        "actor/pg_clipfrac_low": low,
        "actor/pg_clipfrac_high": high,
        "actor/pg_clipfrac_lower": totals["clipped_dual"] / count,
        "actor/ppo_kl": totals["old_minus_current"] / count,
        "actor/ratio_mean": totals["ratio"] / count,
        "actor/ratio_max": float(sums.maxima["ratio"]),
        "rollout_corr/rollout_is_mean": totals["importance"] / count,
        "rollout_corr/rollout_is_truncated": totals["truncated"] / count,
        "rollout_corr/kl": -totals["difference"] / count,
        "rollout_corr/logprob_diff_mean": totals["absolute_difference"] / count,
        "rollout_corr/logprob_diff_max": float(sums.maxima["absolute_difference"]),
    }
    correlation = _correlation(totals)
    if correlation is not None:
        metrics["rollout_corr/logprob_pearson_corr"] = correlation
    return metrics


def _correlation(totals: Mapping[str, float]) -> float | None:
    """Pearson correlation of trainer and sampler log-probabilities from their moments."""
    count = totals["tokens"]
    mean_old, mean_behaviour = totals["old"] / count, totals["behaviour"] / count
    variance_old = totals["old_squared"] / count - mean_old**2
    variance_behaviour = totals["behaviour_squared"] / count - mean_behaviour**2
    # The moments are float32 sums: below this share of the square the variance is rounding.
    floor = 1e-6 * max(totals["old_squared"], totals["behaviour_squared"]) / count
    if min(variance_old, variance_behaviour) <= floor:
        return None
    covariance = totals["old_behaviour"] / count - mean_old * mean_behaviour
    return float(np.clip(covariance / np.sqrt(variance_old * variance_behaviour), -1, 1))


class TokenCounts(NamedTuple):
    """Active tokens, and sequences with at least one; summed over hosts they are global."""

    tokens: int
    sequences: int


def count_tokens(masks: Iterable[np.ndarray]) -> TokenCounts:
    """Counts the active tokens of boolean masks [T_i], and the masks that have any."""
    lengths = [int(np.count_nonzero(mask)) for mask in masks]
    return TokenCounts(sum(lengths), sum(length > 0 for length in lengths))


def token_weights(mask: np.ndarray, aggregation: Aggregation, counts: TokenCounts) -> np.ndarray:
    """Per-token weights of one sequence under which sum(weight * loss) is the batch's loss.

    Args:
      mask: [T] bool, the sequence's active tokens.
      aggregation: "token-mean": the mean over all tokens of the batch; "seq-mean-token-mean" and
        "seq-mean-token-sum": the mean over sequences of the token mean or sum.
      counts: global counts, over the whole batch and all hosts.

    Returns:
      [T] float32, zero outside the mask.

    Raises:
      ValueError: `aggregation` is none of these.
    """
    length = int(np.count_nonzero(mask))
    if aggregation == "token-mean":
        divisor = counts.tokens
    elif aggregation == "seq-mean-token-mean":
        divisor = counts.sequences * length
    elif aggregation == "seq-mean-token-sum":
        divisor = counts.sequences
    else:
        raise ValueError(
            f"aggregation is {aggregation!r}; use one of {', '.join(get_args(Aggregation))}"
        )
    return np.where(mask, 1.0 / max(divisor, 1), 0.0).astype(np.float32)
