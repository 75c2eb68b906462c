"""A CPU that multiplies float32 in bfloat16 by default, as a TPU does. Import it before anything is
compiled."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir


def _product(x, y, *, dimension_numbers, precision, preferred_element_type, **_):
    """Computes `lax.dot_general` by sums of products. Without a precision it rounds the operands
    first."""
    if precision is None or lax.Precision.DEFAULT in precision:
        x, y = (lax.reduce_precision(z, 8, 7) for z in (x, y))
    (over_x, over_y), (batch_x, batch_y) = dimension_numbers
    free_x = [d for d in range(x.ndim) if d not in (*over_x, *batch_x)]
    free_y = [d for d in range(y.ndim) if d not in (*over_y, *batch_y)]
    batch = [x.shape[d] for d in batch_x]
    rows, columns = [x.shape[d] for d in free_x], [y.shape[d] for d in free_y]
    x = x.transpose((*batch_x, *free_x, *over_x)).reshape(*batch, math.prod(rows), 1, -1)
    y = y.transpose((*batch_y, *free_y, *over_y)).reshape(*batch, 1, math.prod(columns), -1)
    product = (x * y).sum(-1).reshape(*batch, *rows, *columns)
    return product if preferred_element_type is None else product.astype(preferred_element_type)


mlir.register_lowering(
    lax.dot_general_p, mlir.lower_fun(_product, multiple_results=False), platform="cpu"
)

# The simulation is one: a product of default precision is rounded, and one of the highest is not.
_third = jnp.full((1, 1), 1 / 3)
assert jax.jit(jnp.matmul)(_third, 3 * _third) != jnp.float32(1 / 3)
assert jax.jit(lambda x, y: jnp.matmul(x, y, precision="highest"))(
    _third, 3 * _third
) == jnp.float32(1 / 3)
