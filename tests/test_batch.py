"""Packing: where tokens and weights go, counts, order, what is dropped and what is refused."""

import batch_doubles as doubles
import numpy as np
import pytest

from rlds_jax import batch as batching
from rlds_jax.batch import BatchError, BatchLayout


def unpack(batch):
    """(tokens, targets, policy_weight, channel) of every segment, by micro-batch, row, segment."""
    found = []
    for micro, row in np.ndindex(batch.tokens.shape[:2]):
        for segment in range(1, batch.segment_ids[micro, row].max() + 1):
            at = (micro, row, batch.segment_ids[micro, row] == segment)
            fields = (batch.tokens, batch.targets, batch.policy_weight, batch.channel)
            found.append(tuple(field[at] for field in fields))
    return found


def sequence(key, length, weight=1.0):
    tokens = np.arange(length, dtype=np.int32)
    return batching.nll_sequence((key,), tokens, np.full(length, weight, np.float32))


def test_worked_row():
    weight = np.array([0, 0, 0.5, 0, 0.25, 0], np.float32)
    first = batching.nll_sequence(("a",), np.array([7, 8, 9, 10, 11, 12], np.int32), weight, 2)
    second = sequence("b", 3)
    batch = batching.pack([second, first], BatchLayout(1, 8, 2))
    # The first ends at the input that predicts token 4, its last target: token 5 is cut.
    assert batch.tokens[0, 0].tolist() == [7, 8, 9, 10, 0, 1, 0, 0]
    assert batch.targets[0, 0].tolist() == [8, 9, 10, 11, 1, 2, 0, 0]
    assert batch.segment_ids[0, 0].tolist() == [1, 1, 1, 1, 2, 2, 0, 0]
    assert batch.positions[0, 0].tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
    assert batch.nll_weight[0, 0].tolist() == [0, 0.5, 0, 0.25, 1, 1, 0, 0]
    assert batch.channel[0, 0].tolist() == [2, 2, 2, 2, 0, 0, 0, 0]
    assert batch.num_micro == 1
    assert not batch.segment_ids[1].any()


def test_policy_fields_belong_to_the_target():
    rows = doubles.policy_rows(lengths=(9,))
    batch = batching.pack(rows, BatchLayout(1, 16, 1))
    (source,) = rows
    n = source.positions
    for name in ("advantage", "policy_weight", "kl_weight", "behaviour_logprobs"):
        np.testing.assert_array_equal(
            getattr(batch, name)[0, 0, :n], getattr(source, name)[1 : n + 1]
        )
    np.testing.assert_allclose(batch.temperature[0, 0, :n], 0.7)
    assert (batch.temperature[0, 0, n:] == 1).all()


@pytest.mark.parametrize("layout", [BatchLayout(2, 40, 4), BatchLayout(4, 31, 4)])
def test_every_sequence_is_there_once(layout):
    sequences = doubles.all_sequences()
    found = unpack(batching.pack(sequences, layout))
    expected = sorted((s.tokens[: s.positions].tolist(), s.channel) for s in sequences)
    assert sorted((tokens.tolist(), int(c[0])) for tokens, _, _, c in found) == expected


def test_packing_does_not_depend_on_the_order_of_arrival():
    sequences = doubles.all_sequences()
    layout = BatchLayout(2, 40, 4)
    one, other = (batching.pack(order, layout) for order in (sequences, sequences[::-1]))
    for name in vars(one):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_first_fit_takes_the_first_row_with_room():
    rows = batching.first_fit(
        [sequence(k, n) for k, n in zip("abcd", (6, 8, 3, 4), strict=True)], 9
    )
    assert [[s.key[0] for s in row] for row in rows] == [["a", "c"], ["b"], ["d"]]


def test_packing_wastes_under_8_percent():
    """512 sequences, in the order they came: log-uniform in [64, 4096], in rows of 4096."""
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(64), np.log(4096), 512)).astype(int)
    sequences = [sequence(f"{i:03}", n + 1) for i, n in enumerate(lengths)]
    rows = batching.first_fit(sequences, 4096)
    assert 1 - lengths.sum() / (4096 * len(rows)) < 0.08


def test_sequences_without_weights_are_not_packed():
    batch = batching.pack([sequence("a", 6, weight=0.0)], BatchLayout(1, 8, 1))
    assert batch.num_micro == 0
    assert not batch.segment_ids.any()


def test_too_long_and_too_many_are_refused():
    with pytest.raises(BatchError, match="needs 9 positions, a row has 8"):
        batching.pack([sequence("a", 10)], BatchLayout(1, 8, 1))
    with pytest.raises(BatchError, match=r"fills 2 micro-batches of 1 x 8 .* max_micro is 1"):
        batching.pack([sequence("a", 9), sequence("b", 9)], BatchLayout(1, 8, 1))


@pytest.mark.parametrize("field", ["rows", "row_length", "max_micro"])
def test_layout_names_a_bad_field(field):
    with pytest.raises(ValueError, match=field):
        BatchLayout(**({"rows": 1, "row_length": 1, "max_micro": 1} | {field: 0}))


def test_token_mean_weights_are_one_over_the_global_count():
    sequences = doubles.policy_rows()
    counts = [np.count_nonzero(s.policy_weight) for s in sequences]
    for s in sequences:
        assert set(np.unique(s.policy_weight)) <= {0, np.float32(1 / sum(counts))}
    assert len(set(counts)) > 1


def test_sequence_mean_weights_sum_to_the_share_of_a_sequence():
    sequences = doubles.policy_rows(aggregation="seq-mean-token-mean")
    active = [s for s in sequences if s.policy_weight.any()]
    for s in active:
        assert s.policy_weight.sum() == pytest.approx(1 / len(active))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, m: (a[:-1], m), "advantage has shape"),
        (lambda a, m: (a, m[:-1]), "loss mask has shape"),
        (lambda a, m: (a, np.ones_like(m)), "unsampled token"),
        (lambda a, m: (np.where(m, np.nan, a), m), "not finite"),
    ],
)
def test_bad_policy_fields_name_the_trajectory(change, message):
    row = doubles.trajectory("0/0/3", 12, np.random.default_rng(0))
    advantage, mask = change(np.zeros(12, np.float32), row.turn_ids >= 0)
    with pytest.raises(ValueError, match=f"0/0/3.*{message}"):
        batching.policy_sequences([row], [advantage], [mask])


def test_an_advantage_outside_the_mask_may_be_anything():
    row = doubles.trajectory("0/0/3", 12, np.random.default_rng(0))
    mask = row.turn_ids >= 1
    advantage = np.where(mask, 1.0, np.nan).astype(np.float32)
    (result,) = batching.policy_sequences([row], [advantage], [mask])
    assert np.isfinite(result.advantage).all()


def auxiliary(pairs, **options):
    options = {"coefficients": doubles.COEFFICIENTS} | options
    return batching.auxiliary_sequences(pairs, BatchLayout(1, 20, 1), **options)


def test_auxiliary_weights_are_coefficient_delta_over_pairs_and_tokens():
    rng = np.random.default_rng(0)
    pairs = [doubles.pair("retry", "a", 10, 1.0, rng), doubles.pair("retry", "b", 8, 0.5, rng)]
    sequences, metrics = auxiliary(pairs)
    assert [s.key for s in sequences] == [("", "a", "retry"), ("", "b", "retry")]
    np.testing.assert_allclose(sequences[0].nll_weight[5:], 0.10 * 1.0 / 2 / 5)
    np.testing.assert_allclose(sequences[1].nll_weight[4:], 0.10 * 0.5 / 2 / 4)
    assert not sequences[0].nll_weight[:5].any()
    assert metrics["aux/retry/pairs"] == 2
    assert metrics["aux/retry/delta"] == 0.75
    assert metrics["aux/reflect/pairs"] == 0
    assert "aux/reflect/delta" not in metrics


def test_the_largest_deltas_are_kept_per_channel():
    rng = np.random.default_rng(0)
    pairs = [doubles.pair("retry", f"{i:02}", 10, delta, rng) for i, delta in enumerate([1, 3, 2])]
    pairs.append(doubles.pair("reflect", "09", 10, 0.1, rng))
    sequences, _ = auxiliary(pairs, max_pairs=2)
    assert {s.key[1:] for s in sequences} == {("01", "retry"), ("02", "retry"), ("09", "reflect")}


def test_a_pair_that_does_not_fit_is_counted_and_leaves_the_mean():
    rng = np.random.default_rng(0)
    pairs = [doubles.pair("reflect", "a", 22, 9.0, rng), doubles.pair("reflect", "b", 21, 1.0, rng)]
    sequences, metrics = auxiliary(pairs)
    assert [s.key[1] for s in sequences] == ["b"]
    assert metrics["aux/reflect/too_long"] == 1
    assert sequences[0].nll_weight.sum() == pytest.approx(0.05)


def test_a_channel_with_coefficient_zero_is_left_out():
    rng = np.random.default_rng(0)
    pairs = [doubles.pair("reflect", "a", 10, 1.0, rng), doubles.pair("retry", "a", 10, 1.0, rng)]
    sequences, metrics = auxiliary(pairs, coefficients={"reflect": 0.0, "retry": 0.1})
    assert [s.key[2] for s in sequences] == ["retry"]
    assert metrics["aux/reflect/pairs"] == 0
