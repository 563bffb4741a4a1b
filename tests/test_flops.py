"""FLOPs counted on the jaxpr against numbers worked by hand and an unrolled model."""

import dataclasses

import batch_doubles as doubles
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from rlds_jax import flops
from rlds_jax.models import qwen3


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_a_product_counts_two_per_multiply_add_and_its_three_arrays():
    work = flops.count(jnp.dot, shape(3, 5), shape(5, 7))
    assert work == flops.Work(flops=2 * 3 * 5 * 7, bytes=4 * (15 + 35 + 21))


def test_a_gradient_costs_two_more_products():
    work = flops.count(jax.grad(lambda a, b: (a @ b).sum(), (0, 1)), shape(3, 5), shape(5, 7))
    assert work.flops == 3 * 2 * 3 * 5 * 7


def test_a_scan_counts_every_iteration():
    def chain(x, weights):
        return lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    assert flops.count(chain, shape(4, 8), shape(10, 8, 8)).flops == 10 * 2 * 4 * 8 * 8


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_scanned_model_counts_as_its_layers_one_by_one(remat):
    """Each further layer adds the same work, and attention is told from the rest."""
    row = [jax.ShapeDtypeStruct((1, 64), jnp.int32)] * 3

    def work(layers):
        config = dataclasses.replace(doubles.MODEL, num_layers=layers)
        params = jax.eval_shape(lambda: qwen3.init_params(config, jax.random.key(0)))

        def loss(params, *row):
            hidden = qwen3.hidden_states(params, config, *row, remat=remat, attention="dense")
            return jnp.sum(hidden**2)

        return flops.count(jax.grad(loss), params, *row, row_length=64)

    one, two, four = (work(layers) for layers in (1, 2, 4))
    per_layer = two.flops - one.flops
    assert four.flops - two.flops == 2 * per_layer
    config = doubles.MODEL
    width = config.num_heads * config.head_dim
    weights = config.hidden_size * (
        2 * width + 2 * config.num_kv_heads * config.head_dim + 3 * config.intermediate_size
    )
    # The last product of a layer is not needed again for its gradient.
    again = weights - config.hidden_size * config.intermediate_size if remat == "full" else 0
    assert per_layer == 2 * 64 * (3 * weights + again)
    # Forward two products, backward four, and the forward again under remat.
    assert two.attention - one.attention == {"none": 6, "full": 8}[remat] * 2 * 64 * 64 * width


def test_xla_counts_the_same_products_where_no_loop_hides_them():
    """XLA adds elementwise work, under 2%, and counts a loop's body once.

    So of blockwise attention, the default on a CPU, it sees one block of queries, which alone is
    why its count of a model without loops over layers is 0.89 of ours.
    """
    length, block = 512, 64
    config = dataclasses.replace(
        doubles.MODEL, num_layers=1, hidden_size=128, intermediate_size=256, head_dim=64
    )
    params = jax.eval_shape(lambda: qwen3.init_params(config, jax.random.key(0)))
    row = [jax.ShapeDtypeStruct((1, length), jnp.int32)] * 3

    def counts(attention):
        def loss(params, *row):
            return jnp.sum(qwen3.hidden_states(params, config, *row, attention=attention) ** 2)

        ours = flops.count(jax.grad(loss), params, *row, row_length=length)
        return ours, jax.jit(jax.grad(loss)).lower(params, *row).cost_analysis()["flops"]

    dense, xla = counts("dense")
    assert 1 <= xla / (dense.flops + dense.attention) < 1.02
    blockwise, xla = counts("blockwise")
    looped = blockwise.flops - dense.flops
    assert 1 <= xla / (dense.flops + looped * block / length) < 1.02
    assert xla / blockwise.flops == pytest.approx(0.89, abs=0.005)
