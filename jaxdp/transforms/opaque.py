"""Values that XLA on CPU cannot know as it compiles. They decide when it computes what, and in
which loop.

XLA on CPU removes barriers before it fuses and orders operations. Other backends keep them, and
need none of this.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def zero(after: jax.Array) -> jax.Array:
    """Returns the uint32 scalar 0, which cannot be computed before `after`, an array [...] of at
    least one entry.
    """
    entry = lax.slice_in_dim(after.reshape(-1), 0, 1).reshape(())
    word = (
        entry
        if entry.dtype == jnp.uint32
        else lax.bitcast_convert_type(entry.astype(jnp.float32), jnp.uint32)
    )
    return jnp.minimum(word, 0)


@jax.custom_jvp
def formed(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns `x`, which XLA computes in its own shape, where `zero` is a result of the function
    above.

    XLA would compute it in the shape of a reshape that follows, element by element where rows could
    be copied. It cannot know that the loop here has no turn.
    """
    result: jax.Array = lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, -s[1]), (zero, x))[
        1
    ]
    return result


@formed.defjvp
def _formed_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return formed(*primals), tangents[0]  # JAX cannot reverse such a loop
