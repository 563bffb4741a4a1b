"""The optimizer step: one jitted function (state, reference, batch) -> (state, outcome).

Micro-batches run in a `fori_loop` of traced length with float32 accumulators, so one compilation
serves every batch of a run and absent micro-batches cost nothing (METHOD section 3).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from rlds_jax import losses, sharding
from rlds_jax.batch import CHANNELS, Batch, Leaf
from rlds_jax.models import qwen3
from rlds_jax.models.attention import Choice
from rlds_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (METHOD section 3).

    Attributes:
      schedule: "constant", or "cosine" down to 0 at `total_steps`; both after a linear warm-up.
      clip_norm: global norm the gradient is clipped to.
      moment_dtype: of the first moment; the second stays float32.

    Raises:
      ValueError: naming the field that is out of range; or cosine lacks `total_steps`.
    """

    learning_rate: float = 1e-6
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    moment_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        for name, holds, allowed in (
            ("learning_rate", 0 <= self.learning_rate < math.inf, "finite and not negative"),
            ("b1", 0 <= self.b1 < 1, "in [0, 1)"),
            ("b2", 0 <= self.b2 < 1, "in [0, 1)"),
            ("eps", 0 < self.eps < math.inf, "positive and finite"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "finite and not negative"),
            ("clip_norm", self.clip_norm > 0, "positive"),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
        ):
            if not holds:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; it must be {allowed}")
        if self.moment_dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f"optimizer.moment_dtype is {self.moment_dtype!r}; use float32 or bfloat16"
            )
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"schedule is {self.schedule!r}; use constant or cosine")
        if self.schedule == "cosine" and (self.total_steps or 0) <= self.warmup_steps:
            raise ValueError(
                f"the cosine schedule needs optimizer.total_steps ({self.total_steps}) above "
                f"warmup_steps ({self.warmup_steps}); lower that or train for more steps"
            )


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """How the forward and backward pass run; none of it changes the mathematics.

    Attributes:
      dtype: of activations and matmuls; parameters, moments and sums stay float32.
      remat: see `qwen3.hidden_states`.
      attention: see models/attention.py; "auto" is settled by models/attention_gate.py.
      logprob_chunk: tokens whose logits exist at once.

    Raises:
      ValueError: naming the field that is out of range.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    remat: qwen3.Remat = "none"
    attention: Choice = "blockwise"
    logprob_chunk: int = 512

    def __post_init__(self):
        for name, annotation in get_type_hints(ComputeConfig).items():
            value, allowed = getattr(self, name), get_args(annotation)
            if allowed and value not in allowed:
                raise ValueError(f"compute.{name} is {value!r}; use one of {allowed}")
        if self.logprob_chunk < 1:
            raise ValueError(f"compute.logprob_chunk is {self.logprob_chunk}; at least 1")


@flax.struct.dataclass
class TrainState:
    """Everything the optimizer step carries.

    Attributes:
      step: [] int32, updates attempted.
      params: float32 master parameters.
      opt_state: moments and the count of updates taken.
      rng: key of the run.
    """

    step: Leaf
    params: qwen3.Params
    opt_state: optax.OptState
    rng: Leaf


class Outcome(NamedTuple):
    """What one update reports, still on the device; `metrics` brings it to the host.

    Attributes:
      loss: total loss of the batch.
      sums: statistics of the loss.
      channel_nll: [len(CHANNELS)] weighted NLL by auxiliary channel.
      grad_norm: before clipping.
      learning_rate: of this step.
      empty: no active token, so nothing was updated.
      nonfinite: loss or gradient was not finite, so nothing was updated.
    """

    loss: jax.Array
    sums: losses.LossSums
    channel_nll: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    empty: jax.Array
    nonfinite: jax.Array


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate by count of updates taken."""
    if config.schedule == "cosine":
        assert config.total_steps is not None
        return optax.warmup_cosine_decay_schedule(
            0.0 if config.warmup_steps else config.learning_rate,
            config.learning_rate,
            config.warmup_steps,
            config.total_steps,
        )
    if config.warmup_steps:
        return optax.warmup_constant_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.constant_schedule(config.learning_rate)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping and AdamW, decay on every parameter."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mu_dtype=config.moment_dtype,
        ),
    )


def init_state(params: qwen3.Params, optimizer: optax.GradientTransformation, rng) -> TrainState:
    """A fresh state. The parameters are used as they are, and donated by the first update."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), rng)


def updates_taken(state: TrainState) -> jax.Array:
    """[] int32, the optimizer's count; skipped updates are not in it."""
    return optax.tree_utils.tree_get(state.opt_state, "ScaleByAdamState").count


def state_shardings(
    model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shardings of a TrainState: moments lie like their parameters, scalars are replicated."""
    params = sharding.parameter_shardings(model, mesh)
    whole = sharding.replicated(mesh)
    abstract = jax.eval_shape(lambda: qwen3.init_params(model, jax.random.key(0)))
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, param_sharding: param_sharding,
        jax.eval_shape(optimizer.init, abstract),
        params,
        transform_non_params=lambda _: whole,
    )
    return TrainState(whole, params, opt_state, whole)


def batch_shardings(mesh: Mesh, with_old_logprobs: bool = False) -> Batch:
    """Shardings of a Batch: rows over data and fsdp."""
    rows = sharding.row_sharding(mesh)
    fields: dict[str, Leaf] = {field.name: rows for field in dataclasses.fields(Batch)}
    fields["num_micro"] = sharding.replicated(mesh)
    if not with_old_logprobs:
        fields["old_logprobs"] = None
    return Batch(**fields)


def put_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Copies a packed batch, the same in every process, to the devices of `mesh`."""
    return jax.tree.map(
        lambda x, place: jax.make_array_from_process_local_data(place, x, x.shape),
        batch,
        batch_shardings(mesh, batch.old_logprobs is not None),
    )


def _logprobs(params, model: ModelConfig, compute: ComputeConfig, micro: Batch, mesh: Mesh | None):
    """Log-probability and entropy of the active targets, [rows, row_length] float32, else 0."""
    hidden = qwen3.hidden_states(
        params,
        model,
        micro.tokens,
        micro.positions,
        micro.segment_ids,
        compute_dtype=jnp.dtype(compute.dtype),
        remat=compute.remat,
        attention=compute.attention,
        mesh=mesh,
    )
    active = (micro.policy_weight > 0) | (micro.kl_weight > 0) | (micro.nll_weight > 0)
    return qwen3.row_logprobs(
        hidden,
        qwen3.unembedding(params),
        micro.targets,
        micro.temperature,
        active,
        chunk_size=compute.logprob_chunk,
        mesh=mesh,
    )


def _micro_batch(batch: Batch, index) -> Batch:
    arrays = dataclasses.replace(batch, num_micro=None)
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), arrays)


def _micro_loss(params, reference, micro: Batch, model, loss_config, compute, mesh):
    logprobs, entropy = _logprobs(params, model, compute, micro, mesh)
    reference_logprobs = None
    if loss_config.needs_reference:
        reference_logprobs, _ = _logprobs(reference, model, compute, micro, mesh)
        reference_logprobs = lax.stop_gradient(reference_logprobs)
    fields = losses.TokenFields(
        micro.advantage,
        micro.policy_weight,
        micro.kl_weight,
        micro.nll_weight,
        micro.behaviour_logprobs,
        micro.old_logprobs,
    )
    loss, sums = losses.total(logprobs, entropy, reference_logprobs, fields, loss_config)
    nll = jnp.where(micro.nll_weight > 0, -logprobs * micro.nll_weight, 0.0)
    channels = jnp.arange(1, len(CHANNELS) + 1)[:, None, None]
    channel_nll = jnp.sum(jnp.where(micro.channel == channels, nll, 0.0), axis=(1, 2))
    return loss, (loss, sums, lax.stop_gradient(channel_nll))


def accumulate(
    params,
    reference,
    batch: Batch,
    *,
    model: ModelConfig,
    loss_config: losses.LossConfig,
    compute: ComputeConfig,
    mesh: Mesh | None = None,
):
    """Gradient and statistics of a whole batch, micro-batch by micro-batch.

    Returns:
      float32 gradients like `params`, and (loss, LossSums, channel_nll).
    """

    def micro_gradient(micro):
        return jax.grad(_micro_loss, has_aux=True)(
            params, reference, micro, model, loss_config, compute, mesh
        )

    def body(index, carry):
        total_gradient, (total_loss, total_sums, total_nll) = carry
        gradient, (loss, sums, nll) = micro_gradient(_micro_batch(batch, index))
        statistics = (total_loss + loss, total_sums.combine(sums), total_nll + nll)
        return jax.tree.map(jnp.add, total_gradient, gradient), statistics

    shapes = jax.eval_shape(lambda: micro_gradient(_micro_batch(batch, 0)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    return lax.fori_loop(0, batch.num_micro, body, zeros)


@functools.cache
def make_update(
    model: ModelConfig,
    optimizer_config: OptimizerConfig,
    loss_config: losses.LossConfig,
    compute: ComputeConfig,
    mesh: Mesh | None = None,
    with_old_logprobs: bool = False,
) -> Callable[[TrainState, qwen3.Params | None, Batch], tuple[TrainState, Outcome]]:
    """The jitted update. It donates the state it is given. Equal arguments share one compilation.

    Its arguments are the state, the reference parameters (None unless
    `loss_config.needs_reference`) and a batch. An empty batch, or a loss or gradient that is not
    finite, leaves parameters, moments and count as they were; `step` advances all the same.

    Args:
      mesh: where to run; None for the default device.
      with_old_logprobs: whether batches hold them; needed for several updates per step.
    """
    optimizer = make_optimizer(optimizer_config)
    schedule = make_schedule(optimizer_config)

    def update(state: TrainState, reference, batch: Batch) -> tuple[TrainState, Outcome]:
        gradient, (loss, sums, channel_nll) = accumulate(
            state.params,
            reference,
            batch,
            model=model,
            loss_config=loss_config,
            compute=compute,
            mesh=mesh,
        )
        grad_norm = optax.tree.norm(gradient)
        weights = (batch.policy_weight, batch.kl_weight, batch.nll_weight)
        active = jnp.any(jnp.stack([jnp.any(weight > 0) for weight in weights]))
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        learning_rate = schedule(updates_taken(state))
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(active & finite, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        state = TrainState(state.step + 1, params, opt_state, state.rng)
        outcome = Outcome(
            loss, sums, channel_nll, grad_norm, jnp.asarray(learning_rate), ~active, ~finite
        )
        return state, outcome

    if mesh is None:
        return jax.jit(update, donate_argnums=0)
    states = state_shardings(model, optimizer, mesh)
    reference = states.params if loss_config.needs_reference else None
    whole = sharding.replicated(mesh)
    return jax.jit(
        update,
        in_shardings=(states, reference, batch_shardings(mesh, with_old_logprobs)),
        out_shardings=(states, whole),
        donate_argnums=0,
    )


@functools.cache
def make_logprobs(
    model: ModelConfig, compute: ComputeConfig, mesh: Mesh | None = None
) -> Callable[[qwen3.Params, Batch], jax.Array]:
    """The jitted pass behind `Batch.old_logprobs`, for several updates per batch.

    It maps (params, batch) to log-probabilities of the targets, [max_micro, rows, row_length]
    float32, zero where no weight is set.
    """

    def logprobs(params, batch: Batch) -> jax.Array:
        def body(index, out):
            values, _ = _logprobs(params, model, compute, _micro_batch(batch, index), mesh)
            return lax.dynamic_update_index_in_dim(out, values, index, 0)

        zeros = jnp.zeros(batch.targets.shape, jnp.float32)
        return lax.fori_loop(0, batch.num_micro, body, zeros)

    return jax.jit(logprobs, out_shardings=None if mesh is None else sharding.row_sharding(mesh))


def metrics(outcome: Outcome) -> dict[str, float]:
    """The metrics of one update by name; waits for the device."""
    outcome = jax.device_get(outcome)
    named: dict[str, Any] = losses.summarise(outcome.sums)
    named |= {
        "actor/loss": outcome.loss,
        "actor/grad_norm": outcome.grad_norm,
        "actor/lr": outcome.learning_rate,
        "actor/update_empty": outcome.empty,
        "actor/update_nonfinite": outcome.nonfinite,
    }
    named |= {f"aux/{name}/loss": x for name, x in zip(CHANNELS, outcome.channel_nll, strict=True)}
    return {name: float(value) for name, value in named.items()}
