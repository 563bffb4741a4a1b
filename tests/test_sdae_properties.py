"""The exact properties of METHOD section 2, and agreement with a float64 token-wise reference."""

import functools

import chex
import hypothesis
import numpy as np
import sdae_reference
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlds_jax import grpo, sdae

ROWS, TOKENS, SUBTASKS, GROUPS, TURNS = 6, 8, 3, 2, 4
NAN = float("nan")
variants = chex.variants(with_jit=True, without_jit=True, with_device=True)
rewards_on_a_grid = st.integers(-10, 40).map(lambda n: n / 20)


def prop(*strategies, examples=40):
    """Runs a test body on drawn examples: `given` inside a method that has chosen its variant."""

    def run(body):
        settings = hypothesis.settings(max_examples=examples, deadline=None, derandomize=True)
        settings(hypothesis.given(*strategies)(body))()

    return run


def array(elements, *shape, dtype=np.float64):
    return hnp.arrays(dtype, shape, elements=elements, fill=st.nothing())


@st.composite
def batches(draw, rewards=rewards_on_a_grid, subtasks=SUBTASKS, groups=GROUPS, padding=True):
    """The seven arguments of `sdae.advantages`, in fixed shapes so that it compiles once."""
    grade = st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0, NAN])
    weights = draw(array(st.integers(1, 10), subtasks))
    turn_ids = draw(array(st.integers(-1, TURNS - 1), ROWS, TOKENS, dtype=np.int64))
    return (
        draw(array(rewards, ROWS)),
        draw(array(grade, ROWS, subtasks)),
        draw(array(st.integers(-2, TURNS + 2), ROWS, subtasks, dtype=np.int64)),
        np.broadcast_to(weights / weights.sum(), (ROWS, subtasks)),
        draw(array(st.integers(-1 if padding else 0, groups - 1), ROWS, dtype=np.int64)),
        turn_ids,
        draw(array(st.integers(0, TURNS), ROWS, dtype=np.int64)),
    )


@functools.cache
def bound(groups, **options):
    """One function per set of options, so that each variant compiles it once."""
    return functools.partial(sdae.advantages, num_groups=groups, num_turns=TURNS, **options)


def kernel(test, groups=GROUPS, **options):
    """`sdae.advantages` in the variant of the test."""
    return test.variant(bound(groups, **options))


def denominator(output):
    sigma = float(output.sigma_batch)
    return 1.0 if sigma < 1e-6 else sigma + 1e-6


class ReferenceTest(chex.TestCase):
    @variants
    def test_agrees_with_the_formulas(self):
        options = st.fixed_dictionaries(
            {
                "negative_rewards": st.sampled_from(["literal", "uniform"]),
                "kernel_norm": st.sampled_from(["response", "active"]),
            }
        )
        runs = {
            (n, k): kernel(self, negative_rewards=n, kernel_norm=k)
            for n in ("literal", "uniform")
            for k in ("response", "active")
        }

        @prop(batches(), options, examples=100)
        def _(batch, options):
            output = runs[options["negative_rewards"], options["kernel_norm"]](*batch)
            expected = sdae_reference.advantages(*batch, **options)
            np.testing.assert_array_equal(output.decomposed, expected["decomposed"])
            for name in ("sigma_batch", "subtask", "share"):
                np.testing.assert_allclose(getattr(output, name), expected[name], atol=2e-6)
            # Normalised values inherit the rounding of A_i divided by sigma.
            scale = min(1.0, expected["denominator"])
            for name in ("row", "token_unmasked", "token"):
                np.testing.assert_allclose(
                    getattr(output, name) * scale, expected[name] * scale, atol=1e-5
                )

    @variants
    def test_agrees_on_continuous_options(self):
        for sigma, fraction in ((0.3, 0.0), (2.5, 0.8)):
            run = kernel(self, kernel_sigma=sigma, min_graded_fraction=fraction)
            rng = np.random.default_rng(0)
            for _ in range(10):
                grades = rng.choice([1.0, 3.0, 5.0, NAN], (ROWS, SUBTASKS))
                batch = (
                    rng.normal(size=ROWS),
                    grades,
                    rng.integers(-1, TURNS, (ROWS, SUBTASKS)),
                    np.broadcast_to([0.5, 0.3, 0.2], (ROWS, SUBTASKS)),
                    rng.integers(0, GROUPS, ROWS),
                    rng.integers(-1, TURNS, (ROWS, TOKENS)),
                    rng.integers(0, 3, ROWS),
                )
                expected = sdae_reference.advantages(
                    *batch, kernel_sigma=sigma, min_graded_fraction=fraction
                )
                np.testing.assert_allclose(run(*batch).token, expected["token"], atol=2e-5)


class PropertyTest(chex.TestCase):
    @variants
    def test_subtask_advantages_sum_to_zero_over_each_group(self):
        run = kernel(self)

        @prop(batches())
        def _(batch):
            subtask = np.asarray(run(*batch).subtask, np.float64)
            for group in range(GROUPS):
                total = subtask[batch[4] == group].sum(axis=0)
                np.testing.assert_allclose(total, np.zeros(SUBTASKS), atol=1e-6)

    @variants
    def test_subtask_rewards_sum_to_the_reward(self):
        run = kernel(self)

        @prop(batches(padding=False))
        def _(batch):
            r = batch[0][:, None] * np.asarray(run(*batch).share, np.float64)
            np.testing.assert_allclose(r.sum(axis=1), batch[0], rtol=1e-6)

    @variants
    def test_token_mean_before_masking_is_the_row_advantage(self):
        run = kernel(self)

        @prop(batches(padding=False))
        def _(batch):
            output = run(*batch)
            for row, token, turns in zip(output.row, output.token_unmasked, batch[5], strict=True):
                if (turns >= 0).any():
                    mean = np.asarray(token, np.float64)[turns >= 0].mean()
                    np.testing.assert_allclose(mean, row, rtol=1e-5, atol=1e-4)

    @variants
    def test_the_retry_mask_removes_and_changes_nothing_else(self):
        run = kernel(self)

        @prop(batches())
        def _(batch):
            output = run(*batch)
            kept = batch[5] >= np.maximum(batch[6], 0)[:, None]
            np.testing.assert_array_equal(output.token, np.where(kept, output.token_unmasked, 0))

    @variants
    def test_one_subtask_in_one_group_is_grpo(self):
        run = kernel(self, groups=1)

        @prop(batches(subtasks=1, groups=1, padding=False))
        def _(batch):
            rewards, grades, pivots, *rest = batch
            hypothesis.assume(np.std(rewards, ddof=1) >= 1e-6)
            output = run(rewards, np.nan_to_num(grades, nan=3.0), np.full_like(pivots, -1), *rest)
            assert np.all(output.decomposed)
            _, group_ids, turn_ids, masks = rest
            expected = grpo.advantages(rewards, group_ids, turn_ids, masks, num_groups=1)
            np.testing.assert_allclose(output.row, expected.row, rtol=1e-5)
            np.testing.assert_allclose(output.token, expected.token, rtol=1e-5)

    @variants
    def test_uniform_weights_make_grades_irrelevant_to_the_row(self):
        run = kernel(self)

        @prop(batches())
        def _(batch):
            weights = np.full((ROWS, SUBTASKS), 1 / SUBTASKS)
            rewards, group_ids = batch[0], batch[4]
            output = run(*batch[:3], weights, *batch[4:])
            raw = np.asarray(output.row) * denominator(output)
            for i in np.flatnonzero(output.decomposed):
                mean = rewards[group_ids == group_ids[i]].mean()
                np.testing.assert_allclose(raw[i], (rewards[i] - mean) / SUBTASKS, atol=1e-6)

    @variants
    def test_permuting_rows_permutes_the_result(self):
        run = kernel(self)

        @prop(batches(), st.permutations(range(ROWS)))
        def _(batch, order):
            self.check_permutation(run, batch, [x[order] for x in batch], lambda name, x: x[order])

    @variants
    def test_permuting_subtasks_permutes_the_result(self):
        run = kernel(self)

        @prop(batches(), st.permutations(range(SUBTASKS)))
        def _(batch, order):
            permuted = [x[:, order] if i in (1, 2, 3) else x for i, x in enumerate(batch)]
            by_subtask = ("subtask", "share")
            self.check_permutation(
                run, batch, permuted, lambda name, x: x[:, order] if name in by_subtask else x
            )

    def check_permutation(self, run, batch, permuted, reorder):
        output, other = run(*batch), run(*permuted)
        scale = min(1.0, denominator(output))
        for name in ("token", "token_unmasked", "row", "subtask", "share", "decomposed"):
            np.testing.assert_allclose(
                np.asarray(getattr(other, name)) * scale,
                reorder(name, np.asarray(getattr(output, name))) * scale,
                atol=1e-5,
            )
        np.testing.assert_allclose(other.sigma_batch, output.sigma_batch, atol=1e-6)

    @variants
    def test_nothing_is_nan_for_finite_rewards(self):
        run = kernel(self)
        anything = st.floats(-(2.0**39), 2.0**39, width=32)
        nothing_new = st.sampled_from([0.0, 1.0, 1e-7, 1 / 3])

        @prop(st.one_of(batches(rewards=anything), batches(rewards=nothing_new)), examples=100)
        def _(batch):
            chex.assert_tree_all_finite(run(*batch))

    @variants
    def test_grades_outside_their_range_are_missing(self):
        run = kernel(self)
        odd = array(st.sampled_from([0.0, 6.0, -3.0, np.inf, -np.inf, NAN, 3.0]), ROWS, SUBTASKS)

        @prop(batches(), odd)
        def _(batch, grades):
            output = run(batch[0], grades, *batch[2:])
            clean = np.where(grades == 3.0, 3.0, NAN)
            chex.assert_trees_all_equal(output, run(batch[0], clean, *batch[2:]))
