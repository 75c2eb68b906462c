"""A step of the optimizer for a box of parameters, the last one of Algorithm 1 for a batch.

Both ends make the step of `train_with_bounds`, and each result is rounded outward.
"""

import jax
import jax.numpy as jnp

from jaxdp.prediction.descent import LeafBounds, Leaves
from jaxdp.prediction.plan import Plan
from jaxdp.transforms.boxes import outward, slack

# The ends of the parameters and of the velocities: low, high, v_low, v_high. A line is a box that
# is trained for one number of changes. Lines have a first axis where several are trained together.
Line = tuple[Leaves, Leaves, Leaves, Leaves]


def advance_box(
    plan: Plan,
    line: Line,
    grads: LeafBounds,
    rate: jax.Array,
    first: jax.Array | None = None,
) -> Line:
    """Makes one step of both ends of a box."""
    low, high, v_low, v_high = line
    # A lower parameter comes from a higher gradient, so velocities cross.
    low, v_high = advance(plan, low, v_high, grads[1], rate, -1, first)
    high, v_low = advance(plan, high, v_low, grads[0], rate, +1, first)
    return low, high, v_low, v_high


def advance(
    plan: Plan,
    params: Leaves,
    velocity: Leaves,
    grads: Leaves,
    rate: jax.Array,
    sign: int = 0,
    first: jax.Array | None = None,
) -> tuple[Leaves, Leaves]:
    """Makes one step of the nominal parameters (sign 0) or of an end of the box.

    Results of an end are rounded outward, down for the lower end (sign -1). If `first` is true, the
    step is not dampened.
    """
    if sign and plan.weight_decay and not plan.momentum:
        decayed = _decayed(plan, params, rate, sign)
        return _descend(plan, decayed, grads, rate, sign), velocity

    def plus(
        grads: Leaves,
        factor: float,
        xs: Leaves,
    ) -> Leaves:
        # The terms may cancel, so the product is rounded separately.
        sums = []
        for grad, x in zip(grads, xs, strict=True):
            product = out(factor * x, -sign, 2)
            sums.append(out(grad + product, -sign))
        return sums

    if plan.weight_decay:
        # Each end decays by itself. This is exact, because no gradient's influence changes sign
        # (T10).
        grads = plus(grads, plan.weight_decay, params)
    steps = grads
    if plan.momentum:
        new = grads
        if plan.dampening:
            share = 1 - plan.dampening
            new = [out(share * grad, -sign, 2) for grad in grads]
        if plan.dampening and first is not None:
            new = [jnp.where(first, x, y) for x, y in zip(grads, new, strict=True)]
        velocity = plus(new, plan.momentum, velocity)  # momentum v + D + weight_decay theta
        steps = velocity
    if plan.nesterov:
        steps = plus(grads, plan.momentum, velocity)  # D + weight_decay theta + momentum v
    return _descend(plan, params, steps, rate, sign), velocity


def _descend(
    plan: Plan,
    params: Leaves,
    steps: Leaves,
    rate: jax.Array,
    sign: int,
) -> Leaves:
    moved = []
    for param, step in zip(params, steps, strict=True):
        change = out(rate * step, -sign)
        moved.append(out(param - change, sign))
    if not plan.l1:
        return moved
    amount = rate * plan.l1
    return [_shrunk(x, amount, sign) for x in moved]


def _shrunk(
    x: jax.Array,
    amount: jax.Array,
    sign: int,
) -> jax.Array:
    """Moves x towards 0 by an amount and stops there, the proximal map of an l1 penalty.

    The map is monotone, so the ends of a box are the images of its ends. A subgradient step jumps
    by twice the amount at 0 and would widen every box there.
    """
    # A positive lower end moves by the larger amount, a negative one by the smaller.
    downward = out(amount, -sign, 2)
    upward = out(amount, sign, 2)
    from_above = out(x - downward, sign)
    from_below = out(x + upward, sign)
    negative = jnp.minimum(from_below, 0)
    return jnp.maximum(from_above, negative)


def _decayed(
    plan: Plan,
    ends: Leaves,
    rate: jax.Array,
    sign: int,
) -> Leaves:
    """Returns ends times 1 - rate weight_decay. One factor is tighter than a sum of two terms."""
    decay = rate * plan.weight_decay
    outermost = jnp.minimum if sign < 0 else jnp.maximum
    error = slack(plan.grid.dtype, 4) * decay  # it may be large compared with 1 - decay
    least = jnp.maximum(1 - decay - error, 0)
    most = 1 - decay + error
    decayed = []
    for end in ends:
        product = outermost(end * least, end * most)
        decayed.append(out(product, sign, 3))
    return decayed


def out(
    x: jax.Array,
    sign: int,
    roundings: int = 1,
) -> jax.Array:
    """Rounds a computed value outward, down for sign -1 and up for +1."""
    if not sign:
        return x
    return outward(x, sign, roundings)
