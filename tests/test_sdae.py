"""SDAE on worked cases, on numbers worked by hand, and on bad input."""

import functools
import json
from fractions import Fraction
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from absl.testing import parameterized

from rlds_jax import sdae

CASES = json.loads((Path(__file__).parent / "cases" / "sdae_cases.json").read_text())["cases"]
NAN = float("nan")
EPS = 1e-6
A, B = np.exp(-1 / 2), np.exp(-2)  # the Gaussian at a distance of one and two turns


@functools.cache
def kernel(num_groups=2, num_turns=8, **options):
    """One function per set of options, so that each variant compiles it once."""
    return functools.partial(sdae.advantages, num_groups=num_groups, num_turns=num_turns, **options)


def inputs(rows, weights, turn_ids):
    """Arrays from (group, reward, grades, pivots[, mask_before_turn]) per row."""
    groups, rewards, grades, pivots, *rest = zip(*rows, strict=True)
    weights = np.broadcast_to(np.asarray(weights, float), np.shape(grades))
    turn_ids = np.broadcast_to(np.asarray(turn_ids), (len(rows), np.shape(turn_ids)[-1]))
    masks = rest[0] if rest else np.zeros(len(rows), int)
    return (
        np.array(rewards, float),
        np.array(grades, float),
        np.array(pivots, int),
        weights,
        np.array(groups),
        turn_ids,
        np.array(masks, int),
    )


def pad(arrays, rows=5, subtasks=5, tokens=8):
    """The same batch in a common shape, so that worked examples share a compilation."""
    shapes = [(rows,), *[(rows, subtasks)] * 3, (rows,), (rows, tokens), (rows,)]
    fill = (0, NAN, -1, 0, -1, -1, 0)
    padded = []
    for x, shape, value in zip(arrays, shapes, fill, strict=True):
        widths = [(0, size - old) for size, old in zip(shape, x.shape, strict=True)]
        padded.append(np.pad(x, widths, constant_values=value))
    return padded


def case_inputs(case):
    """Arrays and options of a worked case."""
    phi, groups = case["inputs"]["phi"], case["inputs"]["groups"]

    def filled(values, missing):
        return [missing if x is None else x for x in values or [None] * len(phi)]

    members = [(g, row) for g, group in enumerate(groups) for row in group]
    length = max(len(row["turn_ids"]) for _, row in members)
    rows = [
        (
            g,
            row["R"],
            filled(row["grades"], NAN),
            filled(row["pivots"], -1),
            row["mask_before_turn"],
        )
        for g, row in members
    ]
    turn_ids = [row["turn_ids"] + [-1] * (length - len(row["turn_ids"])) for _, row in members]
    negative = case["inputs"]["options"].get("neg", "literal")
    return inputs(rows, phi, turn_ids), {"negative_rewards": negative}


class WorkedCasesTest(chex.TestCase, parameterized.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    @parameterized.named_parameters(*((name, name) for name in CASES))
    def test_case(self, name):
        arrays, options = case_inputs(CASES[name])
        output = self.variant(kernel(**options))(*pad(arrays))
        expected = CASES[name]["expected"]
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        close(output.sigma_batch, expected["sigma_batch"])
        for i, row in enumerate(expected["rows"]):
            length = len(row["A_hat_tokens"])
            close(output.row[i], row["A_hat_i"])
            close(output.token[i, :length], row["A_hat_tokens"])
            close(output.token_unmasked[i, :length], row["A_hat_tokens_premask"])
            assert output.decomposed[i] == (row["mode"] == "sdae")
            if row["mode"] == "sdae":
                subtasks = len(row["A_ik_float"])
                close(output.subtask[i, :subtasks], row["A_ik_float"])
                r = [float(Fraction(x)) for x in row["r_ik"]]
                close(arrays[0][i] * output.share[i, :subtasks], r)
        self.check_diagnostics(output, arrays, expected)

    def check_diagnostics(self, output, arrays, expected):
        metrics = sdae.defined_metrics(output.diagnostics)
        wanted = expected["diagnostics"]
        rows = expected["rows"]
        close = functools.partial(pytest.approx, rel=1e-5, abs=1e-5)
        assert metrics["sdae/sign_disagreement_rate"] == close(wanted["sign_disagreement_rows"])
        assert metrics["sdae/sign_disagreement_groups"] == close(wanted["sign_disagreement_groups"])
        assert metrics["sdae/sigma_guarded"] == expected["guarded"]
        if wanted["grpo_correlation"] is None:
            assert "sdae/grpo_correlation" not in metrics
            assert "sdae/centred_correlation" not in metrics
        else:
            assert metrics["sdae/grpo_correlation"] == close(wanted["grpo_correlation"])
        graded = ~np.isnan(arrays[1]).all(axis=1)
        stds = [
            row["token_std_ddof0_effective"]
            for row, pivots, has in zip(rows, arrays[2], graded, strict=True)
            if row["mode"] == "sdae" and has and (pivots >= 0).any()
        ]
        if stds:
            assert metrics["sdae/token_advantage_std"] == close(np.mean(stds))
        else:
            assert "sdae/token_advantage_std" not in metrics


class HandWorkedTest(chex.TestCase):
    def run_padded(self, arrays, **options):
        """The kernel on the padded arrays, its output cut to their rows, subtasks and tokens."""
        output = self.variant(kernel(**options))(*pad(arrays))
        (rows, subtasks), tokens = arrays[3].shape, arrays[5].shape[1]
        return output._replace(
            token=output.token[:rows, :tokens],
            token_unmasked=output.token_unmasked[:rows, :tokens],
            row=output.row[:rows],
            subtask=output.subtask[:rows, :subtasks],
            share=output.share[:rows, :subtasks],
            decomposed=output.decomposed[:rows],
        )

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_two_decomposed_groups_share_one_sigma(self):
        # phi = (3/4, 1/4).
        # Group 0: r = (1, 0), (0, 0); A_ik = +-(1/2, 0); A_i = +-3/8.
        # Group 1: r = (1, 0), (0, 1); A_ik = +-(1/2, -1/2); A_i = +-(3/8 - 1/8) = +-1/4.
        # sigma^2 = (2 (3/8)^2 + 2 (1/4)^2) / 3 = (18/64 + 8/64) / 3 = 13/96.
        arrays = inputs(
            [
                (0, 1.0, (5, 1), (-1, -1)),
                (0, 0.0, (3, 3), (-1, -1)),
                (1, 1.0, (5, 1), (-1, -1)),
                (1, 1.0, (1, 5), (-1, -1)),
            ],
            (3 / 4, 1 / 4),
            [0, -1, 1],
        )
        output = self.run_padded(arrays)
        sigma = np.sqrt(13 / 96)
        np.testing.assert_allclose(output.sigma_batch, sigma, rtol=1e-6)
        row = np.array([3 / 8, -3 / 8, 1 / 4, -1 / 4]) / (sigma + EPS)
        np.testing.assert_allclose(output.row, row, rtol=1e-6)
        np.testing.assert_allclose(output.token, row[:, None] * [1, 0, 1], rtol=1e-6)
        metrics = sdae.defined_metrics(output.diagnostics)
        # Group 1's rows disagree in sign: 2 of 4 rows, 1 of 2 groups.
        assert metrics["sdae/sign_disagreement_rate"] == 0.5
        assert metrics["sdae/sign_disagreement_groups"] == 0.5
        # Centred rewards +-1/2, 0, 0: sum xy = 2 (3/8)(1/2) = 3/8, sum x^2 = 13/32, sum y^2 = 1/2.
        correlation = (3 / 8) / np.sqrt(13 / 32 * 1 / 2)
        assert metrics["sdae/centred_correlation"] == pytest.approx(correlation, rel=1e-5)

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_pivot_past_the_end_is_the_last_turn(self):
        # Turns 0, 0, 1 and pivot 7 -> 1: w = a, a, 1; m = 3 w / (1 + 2 a).
        # A_i = +-1/2, sigma^2 = (1/4 + 1/4) / 1 = 1/2.
        arrays = inputs([(0, 1.0, (4,), (7,)), (0, 0.0, (4,), (-1,))], 1.0, [0, 0, 1])
        output = self.run_padded(arrays)
        row = 0.5 / (np.sqrt(0.5) + EPS)
        kernel = 3 * np.array([A, A, 1]) / (1 + 2 * A)
        np.testing.assert_allclose(output.token, [row * kernel, [-row] * 3], rtol=1e-5)

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_partly_graded_rows(self):
        # Row 0 has half its grades: the missing ones take the mean 4, points (4, 2, 3, 3) of 12.
        # Row 1 has a quarter: ungraded, uniform shares, its pivots null.
        arrays = inputs(
            [
                (0, 1.0, (5, 3, NAN, NAN), (-1, -1, -1, -1)),
                (0, 0.5, (5, NAN, NAN, NAN), (0, 0, 0, 0)),
            ],
            (0.4, 0.3, 0.2, 0.1),
            [0, 1],
        )
        output = self.run_padded(arrays)
        np.testing.assert_allclose(
            output.share, [[1 / 3, 1 / 6, 1 / 4, 1 / 4], [1 / 4] * 4], rtol=1e-6
        )
        # r = (1/3, 1/6, 1/4, 1/4), (1/8, ...); half the difference is (5/48, 1/48, 3/48, 3/48).
        half = np.array([5, 1, 3, 3]) / 48
        np.testing.assert_allclose(output.subtask, [half, -half], rtol=1e-5)
        np.testing.assert_allclose(output.token[1], [output.row[1]] * 2)
        assert output.decomposed.all()
        assert sdae.defined_metrics(output.diagnostics)["grader/parse_rate"] == 0.5

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_mixed_number_of_subtasks(self):
        # Group 0 has one subtask, phi (1, 0, 0): A_i = +-1/2.
        # Group 1 has three, phi (1/2, 1/4, 1/4): r = (1/2, 1/4, 1/4), (0, 0, 0) and A_ik half of
        # them, A_i = +-(1/2 1/4 + 1/4 1/8 + 1/4 1/8) = +-3/16.
        # sigma^2 = (2 (1/2)^2 + 2 (3/16)^2) / 3 = (128/256 + 18/256) / 3 = 146/768.
        arrays = inputs(
            [
                (0, 1.0, (2, NAN, NAN), (-1, -1, -1)),
                (0, 0.0, (5, NAN, NAN), (-1, -1, -1)),
                (1, 1.0, (5, 3, 3), (-1, -1, -1)),
                (1, 0.0, (5, 3, 3), (-1, -1, -1)),
            ],
            [[1, 0, 0], [1, 0, 0], [1 / 2, 1 / 4, 1 / 4], [1 / 2, 1 / 4, 1 / 4]],
            [0],
        )
        output = self.run_padded(arrays)
        sigma = np.sqrt(146 / 768)
        np.testing.assert_allclose(output.sigma_batch, sigma, rtol=1e-6)
        row = np.array([1 / 2, -1 / 2, 3 / 16, -3 / 16]) / (sigma + EPS)
        np.testing.assert_allclose(output.row, row, rtol=1e-6)
        np.testing.assert_allclose(output.share[:2], [[1, 0, 0], [1, 0, 0]])
        np.testing.assert_allclose(output.subtask[0], [1 / 2, 0, 0])
        assert sdae.defined_metrics(output.diagnostics)["grader/parse_rate"] == 1.0

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_retry_start_beyond_the_pivot(self):
        # Turns 0, 1, 1, 2, pivot 0, the loss from turn 1 on. The kernel is normalised over all
        # four tokens first: m = 4 (1, a, a, b) / (1 + 2 a + b).
        arrays = inputs([(0, 1.0, (3,), (0,), 1), (0, 0.0, (3,), (-1,), 0)], 1.0, [0, 1, -1, 1, 2])
        row = 0.5 / (np.sqrt(0.5) + EPS)
        output = self.run_padded(arrays)
        kernel = 4 * np.array([1, A, 0, A, B]) / (1 + 2 * A + B)
        np.testing.assert_allclose(output.token_unmasked[0], row * kernel, rtol=1e-5)
        np.testing.assert_allclose(output.token[0], row * kernel * [0, 1, 1, 1, 1], rtol=1e-5)
        # kernel_norm "active": over the three tokens of the loss mask, m = 3 (a, a, b) / (2 a + b).
        output = self.run_padded(arrays, kernel_norm="active")
        kernel = 3 * np.array([0, A, 0, A, B]) / (2 * A + B)
        np.testing.assert_allclose(output.token[0], row * kernel, rtol=1e-5)

    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_batch_level_token_advantage_std(self):
        # K = 1, turns 0 and 1, pivot 0: m = 2 (1, a) / (1 + a), whose std is (1 - a) / (1 + a).
        # Group 0: R = 1, 0, 1/2, A_i = 1/2, -1/2, 0; group 1 falls back and enters nothing.
        # Rows: 0 has the std above times its advantage; 1 has a pivot but one loss token: 0; 2 has
        # no pivot and is left out. The average is over rows 0 and 1.
        arrays = inputs(
            [
                (0, 1.0, (3,), (0,), 0),
                (0, 0.0, (3,), (0,), 1),
                (0, 0.5, (3,), (-1,), 0),
                (1, 1.0, (NAN,), (0,), 0),
                (1, 0.0, (NAN,), (1,), 0),
            ],
            1.0,
            [0, 1],
        )
        output = self.run_padded(arrays)
        row = 0.5 / (0.5 + EPS)  # sigma^2 = (1/4 + 1/4 + 0) / 2
        metrics = sdae.defined_metrics(output.diagnostics)
        expected = (row * (1 - A) / (1 + A) + 0) / 2
        assert metrics["sdae/token_advantage_std"] == pytest.approx(expected, rel=1e-5)
        assert metrics["sdae/fallback_group_rate"] == 0.5
        assert metrics["grader/parse_rate"] == pytest.approx(3 / 5)


def random_batch(rng, rows=16, tokens=32, subtasks=3, groups=4, turns=8):
    grades = rng.integers(1, 6, (rows, subtasks)).astype(float)
    grades[rng.random(grades.shape) < 0.2] = NAN
    turn_ids = np.sort(rng.integers(0, turns, (rows, tokens)), axis=1)
    turn_ids[rng.random(turn_ids.shape) < 0.3] = -1
    return (
        rng.normal(size=rows),
        grades,
        rng.integers(-1, turns + 2, (rows, subtasks)),
        np.broadcast_to(np.array([0.5, 0.3, 0.2, 0.1])[:subtasks], (rows, subtasks)),
        rng.integers(0, groups, rows),
        turn_ids,
        rng.integers(0, 4, rows),
    )


def test_no_grades_at_all_falls_back_to_grpo():
    # R = 1, 0: centred +-1/2, std sqrt(1/2).
    arrays = inputs([(0, 1.0, (NAN, NAN), (0, 1)), (0, 0.0, (NAN, NAN), (0, 1))], 0.5, [0])
    output = kernel()(*pad(arrays))
    row = 0.5 / (np.sqrt(0.5) + EPS)
    np.testing.assert_allclose(output.token[:2, :1], [[row], [-row]], rtol=1e-6)
    assert not output.decomposed.any()
    assert not output.subtask.any()
    metrics = sdae.defined_metrics(output.diagnostics)
    assert metrics == {"grader/parse_rate": 0.0, "sdae/fallback_group_rate": 1.0}


@pytest.mark.parametrize(
    ("fraction", "decomposed"), [(0.0, True), (0.25, True), (0.26, False), (1.0, False)]
)
def test_min_graded_fraction(fraction, decomposed):
    arrays = inputs([(0, 1.0, (3,), (-1,)), *[(0, 0.0, (NAN,), (-1,))] * 3], 1.0, [0])
    output = sdae.advantages(*arrays, num_groups=1, min_graded_fraction=fraction)
    assert (np.asarray(output.decomposed) == decomposed).all()


def test_retry_mask_holds_in_fallback_groups():
    arrays = inputs([(0, 1.0, (NAN,), (-1,), 1), (0, 0.0, (NAN,), (-1,), 0)], 1.0, [0, 1])
    output = kernel()(*pad(arrays))
    np.testing.assert_array_equal(np.asarray(output.token)[:2, :2] != 0, [[0, 1], [1, 1]])


def test_groups_of_one_row_get_nothing():
    arrays = inputs([(0, 1.0, (3, 4), (0, 1)), (1, 0.3, (NAN, NAN), (0, 1))], (0.6, 0.4), [0, 1])
    output = kernel()(*pad(arrays))
    assert not np.any(output.token_unmasked)
    assert sdae.defined_metrics(output.diagnostics)["sdae/sigma_guarded"] == 1


def test_rows_without_sampled_tokens():
    arrays = inputs([(0, 1.0, (5, 1), (0, 1)), (0, 0.0, (2, 2), (0, 1))], (0.6, 0.4), [-1])
    output = kernel()(*pad(arrays))
    chex.assert_tree_all_finite(output)
    assert not np.any(output.token_unmasked)
    np.testing.assert_allclose(output.row[0], -output.row[1])
    assert output.row[0] > 0


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 1000.1])
@pytest.mark.parametrize("rows", [2, 6, 9, 1000])
def test_equal_rewards_give_exactly_nothing(reward, rows):
    """Rounding must not be divided by a tiny deviation, whatever the float32 mean comes to."""
    rng = np.random.default_rng(0)
    grades = np.where(np.arange(rows)[:, None] % 2, (5, 2, 3), rng.integers(1, 6, (rows, 3)))
    members = [(0, reward, tuple(g), (0, 1, 1)) for g in grades]
    arrays = pad(inputs(members, (1 / 3, 1 / 3, 1 / 3), [0, 1]), 1024, 3, 2)
    uniform = kernel()(*arrays)
    assert not np.any(uniform.row)
    assert uniform.sigma_batch == 0
    arrays[1][:] = (5, 2, 3)
    same_grades = kernel()(*arrays)
    assert not np.any(same_grades.subtask)
    arrays[1][:] = NAN
    fallback = kernel()(*arrays)
    assert not np.any(fallback.token)


def test_ten_thousand_rows():
    rng = np.random.default_rng(1)
    arrays = random_batch(rng, rows=10_000, groups=1)
    output = sdae.advantages(*arrays, num_groups=1)
    chex.assert_tree_all_finite(output)
    np.testing.assert_allclose(np.asarray(output.row, np.float64).std(ddof=1), 1, rtol=1e-4)
    np.testing.assert_allclose(
        np.asarray(output.subtask, np.float64).sum(axis=0), np.zeros(3), atol=1e-3
    )


@pytest.mark.parametrize("garbage", [0.0, 7.0])
def test_padding_enters_nothing(garbage):
    arrays = random_batch(np.random.default_rng(2))
    expected = sdae.advantages(*arrays, num_groups=4)
    # By id with weights, by zero weights with an id; more tokens; more groups.
    extra = [(-1, garbage, 1.0), (9, garbage, 1.0), (0, garbage, 0.0), (-1, garbage, 0.0)]
    others = random_batch(np.random.default_rng(3), rows=len(extra))
    groups, rewards, weights = (np.array(x) for x in zip(*extra, strict=True))
    rewards_, grades, pivots, weights_, _, turn_ids, masks = others
    others = (
        rewards_ * rewards,
        grades,
        pivots,
        weights_ * weights[:, None],
        groups,
        turn_ids,
        masks,
    )
    both = [np.concatenate(x) for x in zip(arrays, others, strict=True)]
    both[5] = np.pad(both[5], ((0, 0), (0, 9)), constant_values=-1)
    output = sdae.advantages(*both, num_groups=6)
    for name in ("token", "token_unmasked"):
        np.testing.assert_allclose(
            getattr(output, name)[:16, :32], getattr(expected, name), atol=1e-6
        )
        assert not np.any(getattr(output, name)[16:])
    for name in ("row", "subtask", "share", "decomposed"):
        np.testing.assert_allclose(getattr(output, name)[:16], getattr(expected, name), atol=1e-6)
        assert not np.any(getattr(output, name)[16:])
    assert sdae.defined_metrics(output.diagnostics) == pytest.approx(
        sdae.defined_metrics(expected.diagnostics), abs=1e-6
    )


@pytest.mark.parametrize("bad", [NAN, np.inf, -np.inf, 1e13])
def test_a_reward_that_is_not_finite_names_its_row(bad):
    arrays = random_batch(np.random.default_rng(0))
    arrays[0][5] = bad
    with pytest.raises(ValueError, match=r"rewards\[5\]"):
        sdae.advantages(*arrays, num_groups=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel_sigma": 0.0}, "kernel_sigma"),
        ({"negative_rewards": "zero"}, "negative_rewards"),
        ({"kernel_norm": "l2"}, "kernel_norm"),
        ({"num_turns": 3}, "num_turns"),
    ],
)
def test_options_out_of_range(change, message):
    arrays = random_batch(np.random.default_rng(0))
    with pytest.raises(ValueError, match=message):
        sdae.advantages(*arrays, num_groups=4, **change)


@pytest.mark.parametrize("bad", [NAN, np.inf, -0.1])
def test_bad_weights_name_their_row(bad):
    arrays = list(random_batch(np.random.default_rng(0)))
    arrays[3] = arrays[3].copy()
    arrays[3][2, 1] = bad
    with pytest.raises(ValueError, match=r"weights\[2\]"):
        sdae.advantages(*arrays, num_groups=4)


@pytest.mark.parametrize("index", range(7))
def test_shapes_are_asserted(index):
    arrays = list(random_batch(np.random.default_rng(0)))
    arrays[index] = arrays[index][:-1]
    with pytest.raises(AssertionError):
        sdae.advantages(*arrays, num_groups=4)


def test_num_turns_is_found_when_it_is_not_given():
    arrays = random_batch(np.random.default_rng(4))
    expected = sdae.advantages(*arrays, num_groups=4, num_turns=8)
    chex.assert_trees_all_close(sdae.advantages(*arrays, num_groups=4), expected, atol=1e-6)
    traced = jax.jit(functools.partial(sdae.advantages, num_groups=4))(*arrays)
    chex.assert_trees_all_close(traced, expected, atol=1e-6)


def test_one_compilation_for_any_content():
    before = sdae._advantages._cache_size()
    rng = np.random.default_rng(0)
    for step in range(50):
        arrays = random_batch(rng, rows=15, turns=1 + step % 8)
        sdae.advantages(
            *arrays, num_groups=4, num_turns=8, kernel_sigma=1.0 + step, min_graded_fraction=0.5
        )
    assert sdae._advantages._cache_size() == before + 1
