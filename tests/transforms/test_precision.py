"""Products in the precision of their dtypes, whatever the platform does by default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdp.transforms.precision import in_full_precision
from tests import forked

X = jnp.arange(12.0).reshape(3, 4)


def nested(x):
    """Products in a loop, in a compiled function, behind a derivative, and with a precision of
    their own."""

    @jax.jit
    def inner(x):
        return jnp.matmul(x, x.T, precision="default")

    looped = lax.scan(lambda total, row: (total + row @ row, None), jnp.float32(0), x)[0]
    images = lax.conv_general_dilated(
        x[None, None], x[None, None], (1, 1), "SAME", precision="default"
    )
    return {
        "sum": inner(x).sum() + looped,
        "grad": jax.grad(lambda x: (x @ x.T).sum())(x),
        "images": images,
    }


def precisions(function):
    lines = jax.jit(function).lower(X).as_text().splitlines()
    products = [line for line in lines if "dot_general" in line or "stablehlo.convolution" in line]
    return len(products), sum(
        "precision = [HIGHEST, HIGHEST]" in line or "HIGHEST" in line for line in products
    )


def test_every_product_has_full_precision():
    count, high = precisions(in_full_precision(nested))
    assert count == high >= 4
    plain, untouched = precisions(nested)
    assert plain == count and untouched == 0
    jax.tree.map(np.testing.assert_array_equal, in_full_precision(nested)(X), nested(X))


PROGRAM = """
import tests.low_precision
import jax, jax.numpy as jnp, numpy as np
import jaxdp
from jaxdp.prediction import descent

rng = np.random.default_rng(0)
data = rng.normal(size=(40, 6)).astype(np.float32), (rng.random(40) < 0.5).astype(np.float32)
params = rng.normal(size=(6, 1)).astype(np.float32)


def loss(params, example):
    x, y = example
    return jaxdp.losses.sigmoid_cross_entropy((x @ params)[0], y)


def inside():
    options = dict(ks=(0, 1), clip=1.0, learning_rate=0.3, batch_size=40, epochs=1, batches=1)
    bounds = jaxdp.prediction.train_with_bounds(loss, params, data, **options)
    return bool(((bounds.lower[0] <= bounds.params) & (bounds.params <= bounds.upper[0])).all())


assert inside()
# The broken twin trains in the default precision.
jax.clear_caches()
descent.in_full_precision = lambda function: function
assert not inside()
"""


@pytest.mark.slow
def test_training_is_inside_its_bounds_where_products_are_rounded_by_default():
    """Tests on a CPU cannot see this otherwise, because a CPU multiplies in full precision."""
    process = forked.run(PROGRAM, modules=forked.STAGES)
    assert process.returncode == 0, process.stderr
