"""The update: layouts that cannot matter, batches that must change nothing, one compilation."""

import dataclasses
import functools

import batch_doubles as doubles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rlds_jax import batch as batching
from rlds_jax import losses, update
from rlds_jax.batch import BatchLayout
from rlds_jax.models import qwen3

MODEL = doubles.MODEL
COMPUTE = update.ComputeConfig(logprob_chunk=16)
LOSS = losses.LossConfig(kl_coefficient=0.01, entropy_coefficient=0.02)
ADAMW = update.OptimizerConfig(learning_rate=1e-3)
LAYOUT = BatchLayout(rows=2, row_length=40, max_micro=4)


def random_params(seed=0):
    """Weights five times the usual size: a fresh small model is close to uniform."""
    params = qwen3.init_params(MODEL, jax.random.key(seed))
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if path[-1].key.endswith("norm") else 5 * x, params
    )


PARAMS, REFERENCE = random_params(0), random_params(1)


@functools.partial(jax.jit, static_argnames=("loss_config", "compute"))
def accumulate(batch, loss_config=LOSS, compute=COMPUTE):
    return update.accumulate(
        PARAMS, REFERENCE, batch, model=MODEL, loss_config=loss_config, compute=compute
    )


def assert_trees_close(a, b, atol):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol, rtol=0), a, b)


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def plain_loss(params):
    """METHOD section 3 on one sequence a row, dense, all logits at once, without clipping.

    At one update per batch the ratio is one, so no clip is active.
    """
    sequences = doubles.all_sequences()
    length = max(len(s.tokens) for s in sequences)

    def stack(name):
        rows = [getattr(s, name) for s in sequences]
        return np.stack([np.pad(row, (0, length - len(row))) for row in rows])[:, 1:]

    tokens = np.stack([np.pad(s.tokens, (0, length - len(s.tokens))) for s in sequences])
    temperature = np.array([s.temperature for s in sequences], np.float32)[:, None, None]

    def log_softmax(p):
        positions = np.broadcast_to(np.arange(length), tokens.shape)
        hidden = qwen3.hidden_states(
            p, MODEL, tokens, positions, np.ones_like(tokens), attention="dense"
        )
        return jax.nn.log_softmax(hidden[:, :-1] @ p["embed"].T / temperature)

    everything, reference = log_softmax(params), log_softmax(REFERENCE)
    chosen, there = (
        jnp.take_along_axis(x, tokens[:, 1:, None], axis=-1)[..., 0]
        for x in (everything, reference)
    )
    entropy = -jnp.sum(jnp.exp(everything) * everything, axis=-1)
    old = jax.lax.stop_gradient(chosen)
    importance = jnp.minimum(jnp.exp(old - stack("behaviour_logprobs")), LOSS.importance_cap)
    policy = -importance * stack("advantage") * jnp.exp(chosen - old)
    kl = jnp.exp(there - chosen) - (there - chosen) - 1
    per_token = policy + LOSS.kl_coefficient * kl - LOSS.entropy_coefficient * entropy
    return jnp.sum(stack("policy_weight") * per_token) - jnp.sum(stack("nll_weight") * chosen)


@pytest.fixture(scope="module")
def expected():
    loss, gradient = jax.jit(jax.value_and_grad(plain_loss))(PARAMS)
    return float(loss), gradient


def one_per_row(sequences, layout):
    return batching.lay_out([[s] for s in sequences], layout)


LAYOUTS = {
    "packed": (batching.pack, BatchLayout(2, 40, 4)),
    "one_micro": (batching.pack, BatchLayout(8, 31, 1)),
    "micro_split": (batching.pack, BatchLayout(1, 40, 8)),
    "wide": (batching.pack, BatchLayout(1, 200, 1)),
    "padded": (one_per_row, BatchLayout(8, 31, 1)),
    "padded_wider_split": (one_per_row, BatchLayout(3, 77, 4)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_does_not_change_loss_or_gradient(expected, name):
    lay, layout = LAYOUTS[name]
    gradient, (loss, _, _) = accumulate(lay(doubles.all_sequences(), layout))
    assert float(loss) == pytest.approx(expected[0], abs=1e-6)
    assert_trees_close(gradient, expected[1], atol=1e-6)


@pytest.mark.parametrize(
    "compute",
    [
        dataclasses.replace(COMPUTE, remat="full", logprob_chunk=3),
        dataclasses.replace(COMPUTE, remat="dots", attention="dense"),
    ],
)
def test_compute_options_do_not_change_the_gradient(expected, compute):
    gradient, _ = accumulate(batching.pack(doubles.all_sequences(), LAYOUT), compute=compute)
    assert_trees_close(gradient, expected[1], atol=1e-6)


def test_bfloat16_is_near(expected):
    compute = dataclasses.replace(COMPUTE, dtype="bfloat16")
    _, (loss, _, _) = accumulate(batching.pack(doubles.all_sequences(), LAYOUT), compute=compute)
    assert float(loss) == pytest.approx(expected[0], abs=0.05)


def garbage(batch):
    """The batch with NaN, or wild ids, in every field where no weight is set."""
    idle = (batch.policy_weight == 0) & (batch.nll_weight == 0)
    rng = np.random.default_rng(5)
    floats = ("advantage", "behaviour_logprobs", "temperature")
    fields = {name: np.where(idle, np.nan, getattr(batch, name)) for name in floats}
    fields["targets"] = np.where(idle, rng.integers(0, 40, idle.shape), batch.targets)
    padding = batch.segment_ids == 0
    fields["tokens"] = np.where(padding, rng.integers(0, 40, idle.shape), batch.tokens)
    return dataclasses.replace(batch, **fields)


def test_garbage_at_masked_positions_changes_nothing(expected):
    batch = garbage(batching.pack(doubles.all_sequences(), LAYOUT))
    gradient, (loss, sums, _) = accumulate(batch)
    assert float(loss) == pytest.approx(expected[0], abs=1e-6)
    assert_trees_close(gradient, expected[1], atol=1e-6)
    assert all(np.isfinite(x) for x in jax.tree.leaves(sums))


def test_log_ratios_of_200_keep_the_gradient_finite():
    batch = batching.pack(doubles.all_sequences(), LAYOUT)
    for shift in (-200.0, 200.0):
        old = np.full(batch.targets.shape, shift, np.float32)
        gradient, (loss, _, _) = accumulate(dataclasses.replace(batch, old_logprobs=old))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((gradient, loss)))


def test_old_logprobs_of_the_current_policy_give_the_same_gradient(expected):
    batch = batching.pack(doubles.all_sequences(), LAYOUT)
    old = update.make_logprobs(MODEL, COMPUTE)(PARAMS, batch)
    gradient, _ = accumulate(dataclasses.replace(batch, old_logprobs=old))
    assert_trees_close(gradient, expected[1], atol=1e-6)


def test_logprobs_of_a_segment_do_not_move_with_its_neighbours():
    rng = np.random.default_rng(0)
    weight = np.ones(12, np.float32)
    one, other, kept = (rng.integers(0, 40, 12).astype(np.int32) for _ in range(3))
    logprobs = update.make_logprobs(MODEL, COMPUTE)
    layout = BatchLayout(1, 24, 1)

    def of_second(first):
        rows = [[batching.nll_sequence((k,), t, weight) for k, t in (("a", first), ("b", kept))]]
        return np.asarray(logprobs(PARAMS, batching.lay_out(rows, layout)))[0, 0, 11:]

    np.testing.assert_array_equal(of_second(one), of_second(other))
    assert of_second(one)[:11].all()


def fresh_state(config=ADAMW):
    params = jax.tree.map(jnp.array, PARAMS)
    return update.init_state(params, update.make_optimizer(config), jax.random.key(0))


@pytest.fixture(scope="module")
def step():
    return update.make_update(MODEL, ADAMW, LOSS, COMPUTE)


def empty_batch():
    return batching.pack([], LAYOUT)


def weightless_batch():
    batch = batching.pack(doubles.all_sequences(), LAYOUT)
    zeros = np.zeros_like(batch.nll_weight)
    return dataclasses.replace(batch, policy_weight=zeros, kl_weight=zeros, nll_weight=zeros)


@pytest.mark.parametrize("make", [empty_batch, weightless_batch])
def test_a_batch_without_active_tokens_changes_nothing(step, make):
    state, outcome = step(fresh_state(), REFERENCE, make())
    assert_trees_equal(state.params, PARAMS)
    assert_trees_equal(state.opt_state, fresh_state().opt_state)
    metrics = update.metrics(outcome)
    assert metrics["actor/update_empty"] == 1
    assert metrics["actor/update_nonfinite"] == 0
    assert int(state.step) == 1
    assert int(update.updates_taken(state)) == 0


def test_a_nonfinite_loss_changes_nothing_and_is_flagged(step):
    batch = batching.pack(doubles.all_sequences(), LAYOUT)
    advantage = np.where(batch.policy_weight > 0, np.inf, 0).astype(np.float32)
    state, outcome = step(fresh_state(), REFERENCE, dataclasses.replace(batch, advantage=advantage))
    assert_trees_equal(state.params, PARAMS)
    assert_trees_equal(state.opt_state, fresh_state().opt_state)
    assert update.metrics(outcome)["actor/update_nonfinite"] == 1


def test_zero_learning_rate_without_decay_leaves_parameters_bitwise():
    config = update.OptimizerConfig(learning_rate=0.0, weight_decay=0.0)
    step = update.make_update(MODEL, config, LOSS, COMPUTE)
    batch = batching.pack(doubles.all_sequences(), LAYOUT)
    state, outcome = step(fresh_state(config), REFERENCE, batch)
    assert_trees_equal(state.params, PARAMS)
    assert int(update.updates_taken(state)) == 1
    assert update.metrics(outcome)["actor/grad_norm"] > 0


def test_one_compilation_over_fifty_varied_steps(step):
    state = fresh_state()
    rng = np.random.default_rng(0)
    before = step._cache_size()
    num_micro = set()
    for _ in range(50):
        lengths = rng.integers(5, 40, rng.integers(0, 7))
        batch = batching.pack(doubles.policy_rows(lengths, seed=int(rng.integers(99))), LAYOUT)
        num_micro.add(int(batch.num_micro))
        state, _ = step(state, REFERENCE, batch)
    assert len(num_micro) >= 4
    assert step._cache_size() - before <= 1
    assert int(state.step) == 50


def test_a_step_moves_nothing_between_host_and_device(step):
    state, placed = jax.device_put((fresh_state(), batching.pack(doubles.all_sequences(), LAYOUT)))
    with jax.transfer_guard("disallow"):
        state, first = step(state, REFERENCE, placed)
        state, second = step(state, REFERENCE, placed)
    assert update.metrics(second)["actor/loss"] < update.metrics(first)["actor/loss"]


def test_training_on_one_batch_lowers_its_nll():
    config = update.OptimizerConfig(learning_rate=1e-2)
    step = update.make_update(MODEL, config, losses.LossConfig(kl="off"), COMPUTE)
    sequences = [s for s in doubles.all_sequences() if s.channel]
    batch, state = batching.pack(sequences, LAYOUT), fresh_state(config)
    seen = []
    for _ in range(20):
        state, outcome = step(state, None, batch)
        seen.append(update.metrics(outcome)["actor/nll_loss"])
    assert seen[-1] < 0.8 * seen[0]


def test_metrics_name_what_the_batch_holds(step):
    batch = batching.pack(doubles.all_sequences(), LAYOUT)
    metrics = update.metrics(step(fresh_state(), REFERENCE, batch)[1])
    nll = metrics["aux/reflect/loss"] + metrics["aux/retry/loss"]
    assert nll == pytest.approx(metrics["actor/nll_loss"], rel=1e-5)
    assert metrics["aux/reflect/loss"] > 0
    total = metrics["actor/pg_loss"] + LOSS.kl_coefficient * metrics["actor/kl_loss"]
    total += nll - LOSS.entropy_coefficient * metrics["actor/entropy"]
    assert metrics["actor/loss"] == pytest.approx(total, rel=1e-5)
    assert metrics["actor/lr"] == pytest.approx(1e-3)
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["rollout_corr/logprob_diff_mean"] > 0


def test_optimizer_is_adamw_with_clipping():
    """Three steps against torch's AdamW and clip_grad_norm_."""
    config = update.OptimizerConfig(learning_rate=0.1, weight_decay=0.05, clip_norm=0.5)
    start = np.linspace(-1, 1, 6, dtype=np.float32)
    theirs = torch.nn.Parameter(torch.tensor(start))
    adamw = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.05)
    optimizer = update.make_optimizer(config)
    ours = jnp.asarray(start)
    opt_state = optimizer.init(ours)
    for i in range(3):
        gradient = np.sin(np.arange(6, dtype=np.float32) + i)
        theirs.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_([theirs], 0.5)
        adamw.step()
        changes, opt_state = optimizer.update(jnp.asarray(gradient), opt_state, ours)
        ours = ours + changes
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)


def test_schedules():
    def rates(**options):
        schedule = update.make_schedule(update.OptimizerConfig(learning_rate=1.0, **options))
        return [float(schedule(step)) for step in (0, 5, 10, 60, 110)]

    assert rates() == [1, 1, 1, 1, 1]
    assert rates(warmup_steps=10) == pytest.approx([0, 0.5, 1, 1, 1])
    cosine = rates(schedule="cosine", warmup_steps=10, total_steps=110)
    assert cosine == pytest.approx([0, 0.5, 1, 0.5, 0], abs=1e-6)
    assert rates(schedule="cosine", total_steps=120)[3] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "linear"}, "schedule is 'linear'"),
        ({"schedule": "cosine"}, "total_steps"),
        ({"schedule": "cosine", "warmup_steps": 5, "total_steps": 5}, "total_steps"),
    ],
)
def test_bad_schedules_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        update.OptimizerConfig(**options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", float("nan")),
        ("learning_rate", -1.0),
        ("b1", 1.0),
        ("b2", -0.1),
        ("eps", 0.0),
        ("weight_decay", float("inf")),
        ("clip_norm", 0.0),
        ("warmup_steps", -1),
    ],
)
def test_bad_optimizers_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"optimizer\.{field} is"):
        update.OptimizerConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int8"), ("remat", "some"), ("attention", "flash"), ("logprob_chunk", 0)],
)
def test_bad_compute_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"compute\.{field} is"):
        update.ComputeConfig(**{field: value})
