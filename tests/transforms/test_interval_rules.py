"""Every rule of `jaxdp.interval`: sound against float64 at sampled points, and isotonic."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxdp
from jaxdp.transforms import boxes, intervals, losses

FAMILIES, LEVELS, POINTS = 5, 4, 24


@dataclasses.dataclass(frozen=True)
class Case:
    """A function whose jaxpr applies `rules` to intervals.

    Attributes:
      rules: Names in the registry.
      fun: The function of the operands. The same code runs in float32 on boxes and in float64 at
          points.
      shapes: The shapes of the operands that are intervals.
      domain: The domain of all operands.
      ulps: The amount by which results may fail to be nested, for functions whose rounding is not
          monotone.
      exact: The function to compare with instead of `fun`, in real arithmetic.
      tight: Whether the box of one point gives the function up to rounding.
    """

    rules: str
    fun: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((6,),)
    domain: tuple[float, float] = (-2.0, 2.0)
    ulps: int = 0
    product: str = "tight"
    exact: Callable[..., Any] | None = None
    tight: bool = True


RNG = np.random.default_rng(0)
CONSTANTS = RNG.normal(size=(6, 6)).astype(np.float32)
LONG = RNG.normal(size=(3, 20)).astype(np.float32)
POSITIVE = RNG.uniform(size=(1, 4, 4, 2)).astype(np.float32)


def like(x, values=CONSTANTS):
    """Makes a constant with the dtype of x and the shape of its values."""
    return jnp.asarray(values, x.dtype)


def pooled(x, init, op, size=(2, 2), strides=(1, 1), padding="SAME"):
    return lax.reduce_window(x, init, op, size, strides, padding)


def convolve(x, w, **kwargs):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **kwargs
    )


def fixed_softmax(x):
    """Computes a softmax without jax.nn."""
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return e / jnp.sum(e, axis=-1, keepdims=True)


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))


@jax.custom_batching.custom_vmap
def tripled(x):
    return x * 3


@tripled.def_vmap
def _tripled_batched(axis_size, in_batched, x):
    return x * 3, True


ONE_HOT = np.eye(4, dtype=np.float32)
SOFT = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
SCALAR = ((),)
MATRIX = ((3, 4),)
IMAGE = ((1, 4, 4, 2),)
PAIR = ((3, 4), (4, 5))
ELEMENTARY = {  # name: function, domain
    "exp": (lax.exp, (-5.0, 5.0)),
    "exp2": (lax.exp2, (-100.0, 100.0)),
    "expm1": (lax.expm1, (-3.0, 3.0)),
    "log1p": (lax.log1p, (-0.9, 5.0)),
    "log": (lax.log, (1e-3, 10.0)),
    "cbrt": (lax.cbrt, (-8.0, 8.0)),
    "asinh": (lax.asinh, (-8.0, 8.0)),
    "atan": (lax.atan, (-8.0, 8.0)),
    "sinh": (lax.sinh, (-80.0, 80.0)),
    "tanh": (lax.tanh, (-8.0, 8.0)),
    "erf": (lax.erf, (-3.0, 3.0)),
    "erfc": (lax.erfc, (-3.0, 9.0)),
    "logistic": (lax.logistic, (-20.0, 20.0)),
    "rsqrt": (lax.rsqrt, (1e-3, 10.0)),
    "sin": (lax.sin, (-10.0, 10.0)),
    "cos": (lax.cos, (-10.0, 10.0)),
}
# What only newer releases of JAX have. They compute the derivatives of tanh and erf by it, and
# stacks.
NEWER = {"stack", "unstack", "one_minus_square", "log2", "polynomial", "exp_neg_sq"}
ABSENT = {
    name
    for name in NEWER
    if not (hasattr(lax, name) or name in str(jax.make_jaxpr(jax.grad(lax.erf))(1.0)))
}
CASES = [
    # Data movement.
    Case("reshape", lambda x: x.reshape(4, 3), MATRIX),
    Case("transpose", lambda x: x.T, MATRIX),
    Case("squeeze", lambda x: lax.squeeze(x, (0,)), ((1, 6),)),
    Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (6, 2), (0,))),
    Case("slice", lambda x: x[1:5:2]),
    Case("rev", lambda x: lax.rev(x, (0,))),
    Case("copy", lambda x: jnp.array(x, copy=True)),
    Case("tile", lambda x: lax.tile(x, (2,))),
    Case("concatenate", lambda x, y: jnp.concatenate([x, y]), ((6,), (3,))),
    Case("stack", lambda x, y: jnp.stack([x, y], 1), ((6,), (6,))),
    Case("unstack", lambda x: jnp.unstack(x), MATRIX),
    Case("pad", lambda x: lax.pad(x, jnp.zeros((), x.dtype), [(1, -2, 1)])),
    Case("split", lambda x: jnp.split(x, 2)),
    Case("gather", lambda x: x[np.array([3, 0, 3, 5])]),
    Case("dynamic_slice", lambda x: lax.dynamic_slice(x, (jnp.int32(2),), (3,))),
    Case(
        "dynamic_update_slice",
        lambda x, y: lax.dynamic_update_slice(x, y, (jnp.int32(2),)),
        ((6,), (3,)),
    ),
    Case("scatter", lambda x, y: x.at[np.array([4, 1])].set(y, unique_indices=True), ((6,), (2,))),
    Case("select_n", lambda x, y: jnp.where(like(x)[0] > 0, x, y), ((6,), (6,))),
    Case("select_n", lambda x, y: jnp.where(x > 0.3, y, -2 * y), ((6,), (6,))),
    Case("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), ((6,), (2,))),
    Case("name", lambda x: checkpoint_name(x, "x")),
    Case("device_put", lambda x: jax.device_put(x, jax.devices()[0])),
    # Monotone without rounding.
    Case("max min", lambda x, y: (jnp.maximum(x, y), jnp.minimum(x, y)), ((6,), (6,))),
    Case("clamp", lambda x: lax.clamp(-0.5, x, 1.0)),
    Case("floor ceil round sign", lambda x: (jnp.floor(x), jnp.ceil(x), jnp.round(x), jnp.sign(x))),
    Case("reduce_max reduce_min", lambda x: (x.max(1), x.min(0)), MATRIX),
    Case("cummax cummin", lambda x: (lax.cummax(x), lax.cummin(x, reverse=True))),
    Case("sort", lambda x: (jnp.sort(x), jnp.argsort(x), lax.sort((like(x)[0], x), num_keys=1))),
    Case("sort", lambda x, y: lax.sort((x, y), num_keys=1, dimension=0), ((4, 3), (4, 3))),
    Case("top_k", lambda x: (lax.top_k(x, 2), lax.top_k(-x.T, 3)), ((3, 4),)),
    Case("reduce_window_max", lambda x: pooled(x, -jnp.inf, lax.max), ((4, 5),)),
    Case("reduce_window_min", lambda x: pooled(x, jnp.inf, lax.min), ((4, 5),)),
    Case(
        "and or not xor gt lt ge le eq ne",
        lambda x, y: (
            (x > 0) & (y > 0),
            (x < y) | (x >= 1),
            ~(x <= y),
            (x > 0) ^ (y > 0),
            x == y,
            x != y,
            x != x,
        ),
        ((6,), (6,)),
    ),
    Case("reduce_and reduce_or", lambda x: ((x > -1).all(), (x > 1).any())),
    Case("neg abs", lambda x: (-x, jnp.abs(x))),
    Case("is_finite", lambda x: jnp.isfinite(x)),
    Case("eq_itself ne_itself", lambda x: (jnp.where(jnp.isnan(x), 9.0, x), x == x)),
    Case("argmax argmin", lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0)), MATRIX),
    Case("eq", lambda x: jax.nn.one_hot(jnp.argmax(x, 1), 4, dtype=x.dtype), MATRIX),
    Case(
        "convert_element_type",
        lambda x: (x.astype(jnp.float16), x.astype(jnp.bfloat16).astype(jnp.float16)),
        exact=lambda x: (x, x),
        tight=False,
    ),
    Case(
        "convert_element_type",
        lambda x: (
            *(x.astype(bool), (x > 0).astype(x.dtype), x.astype(jnp.int32).astype(x.dtype)),
            *(
                (x * 200).astype(jnp.int32).astype(jnp.uint8),
                (x * 200).astype(jnp.int32).astype(jnp.int8),
            ),
        ),
        tight=False,
    ),
    Case("reduce_precision", lambda x: lax.reduce_precision(x, 4, 3), tight=False),
    Case(
        "reduce_precision", lambda x: lax.reduce_precision(x, 4, 3), exact=lambda x: x, tight=False
    ),
    # Elementwise functions.
    *(Case(name, fun, domain=domain, ulps=2) for name, (fun, domain) in ELEMENTARY.items()),
    Case("sqrt", jnp.sqrt, domain=(0.0, 10.0)),
    Case("square integer_pow", lambda x: (x * x, jnp.square(x), x**3, x**4, x**7)),
    Case("integer_pow", lambda x: (x**-1, x**-2, x**-3), domain=(0.1, 3.0)),
    Case("pow", lambda x, y: jnp.abs(x) ** y, ((6,), (6,)), ulps=2),
    Case("pow", lambda x: (x**2.5, 3.0**x), domain=(0.5, 4.0), ulps=2),
    Case("add sub mul", lambda x, y: (x + y, x - y, x * y, 3 * x - 0.1), ((6,), (6,))),
    Case(
        "mul",
        lambda x, y: (jnp.abs(x) * jnp.exp(y), jnp.abs(x) * y, x * like(x)[0]),
        ((6,), (6,)),
        ulps=2,
    ),
    Case("x_plus_xy", lambda x, y: (x + x * y, y * x + x, x + x * 0.3), ((6,), (6,))),
    Case("one_minus_square", jax.grad(lambda x: jnp.sum(jnp.tanh(x))), ulps=64),
    Case("div", lambda x: (x / 3, like(x)[0] / (jnp.abs(x) + 1), x / like(x)[1])),
    Case("div", lambda x, y: x / y, ((6,), (6,)), domain=(0.5, 2.0)),
    Case("div", lambda x, y: (x / (y - 4), x / (y + 2.5)), ((6,), (6,))),
    Case("rem", lambda x: (lax.rem(x, like(x)[0]), jnp.remainder(x, 0.75))),
    Case(
        "rem",
        lambda x, y: (lax.rem(x, y), jnp.fmod(0.5, x)),
        ((6,), (6,)),
        (0.25, 2.0),
        tight=False,
    ),
    Case(
        "logaddexp logaddexp2",
        lambda x, y: (jnp.logaddexp(x, y), jnp.logaddexp2(x, 3 * y)),
        ((6,), (6,)),
        ulps=2,
    ),
    Case(
        "exp_share exp2_share",
        jax.grad(lambda x, y: jnp.sum(jnp.logaddexp(3 * x, y) + jnp.logaddexp2(y, x)), (0, 1)),
        ((6,), (6,)),
        ulps=2,
    ),
    Case(
        "log_sum_exp",
        lambda x: (jax.nn.logsumexp(x, 1), jax.nn.logsumexp(x, 1, keepdims=True)),
        MATRIX,
        ulps=2,
    ),
    Case("log_softmax", lambda x: jax.nn.log_softmax(x), MATRIX, ulps=16),
    Case("log_softmax", lambda x: jax.nn.log_softmax(9 * x), ((2, 40),), ulps=64),
    Case("softmax", lambda x: jax.nn.softmax(x), MATRIX, ulps=16),
    Case("softmax", lambda x: jax.nn.softmax(30 * x), MATRIX, ulps=64),
    Case("softmax", fixed_softmax, MATRIX, ulps=16),
    Case("add_any", jax.grad(lambda x: jnp.sum(jnp.square(x) * x)), ulps=8),
    # Sums.
    Case("reduce_sum", lambda x: (x.sum(), x.mean(1), (x * x).sum(0)), MATRIX),
    Case("cumsum", lambda x: (jnp.cumsum(x, 1), lax.cumsum(x, 0, reverse=True)), MATRIX),
    Case("reduce_window_sum", lambda x: pooled(x, 0.0, lax.add), ((4, 5),)),
    Case("reduce_prod", lambda x: (jnp.prod(x), jnp.prod(jnp.abs(x)), jnp.prod(x, axis=1)), MATRIX),
    Case("cumprod", lambda x: (jnp.cumprod(x, 1), lax.cumprod(x, 0, reverse=True)), MATRIX),
    Case(
        "cumlogsumexp",
        lambda x: (lax.cumlogsumexp(x, 1), lax.cumlogsumexp(3 * x, 0, reverse=True)),
        MATRIX,
        ulps=2,
    ),
    Case("scatter-add", lambda x, y: x.at[np.array([1, 4, 1])].add(y), ((6,), (3,))),
    Case("scatter-add", jax.grad(lambda x: jnp.sum(jnp.square(x[np.array([1, 4, 1])]))), ((6, 2),)),
    Case(
        "select_and_scatter_add",
        jax.grad(lambda x: jnp.sum(pooled(x, -jnp.inf, lax.max) ** 2)),
        ((4, 5),),
    ),
    Case(
        "select_and_scatter_add",
        jax.grad(
            lambda x: jnp.sum(
                like(x)[:2, :2] * pooled(x, jnp.inf, lax.min, (3, 2), (2, 2), "VALID")
            )
        ),
        ((5, 4),),
    ),
    # Products. Midpoints and radii have one form for all shapes and signs.
    *(
        Case("dot_general", fun, shapes)
        for fun, shapes in [
            (lambda x, w: x @ w, PAIR),
            (lambda x, w: jnp.abs(x) @ w, ((3, 20), (20, 5))),
            (lambda x, w: w @ jnp.abs(x), ((20,), (4, 20))),
            (lambda x, w: x @ w, ((3, 20), (20, 5))),
            (lambda w: like(w, LONG) @ w, ((20, 5),)),
            (lambda w: w @ like(w, np.abs(LONG.T)), ((5, 20),)),
            (lambda x, y: x[:, None] @ y[None], ((4,), (3,))),
            (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), ((2, 3, 4), (2, 4, 3))),
            (lambda x, y: jnp.tensordot(x, y, 2), ((3, 4), (3, 4))),
        ]
    ),
    *(
        Case("dot_general", fun, shapes, product="rump", ulps=16)
        for fun, shapes in [
            (lambda x, w: jnp.abs(x) @ w, ((3, 20), (20, 5))),
            (lambda w: like(w, LONG) @ w, ((20, 5),)),
            (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), ((2, 3, 4), (2, 4, 3))),
        ]
    ),
    Case("conv_general_dilated", convolve, ((1, 4, 4, 2), (3, 3, 2, 2))),
    Case("conv_general_dilated", lambda w: convolve(like(w, POSITIVE), w), ((3, 3, 2, 2),)),
    Case(
        "conv_general_dilated",
        convolve,
        ((1, 4, 4, 2), (3, 3, 2, 2)),
        product="rump",
        ulps=16,
    ),
    Case(
        "conv_general_dilated",
        jax.grad(lambda w, x: jnp.sum(convolve(x, w, feature_group_count=2) ** 2)),
        ((2, 2, 1, 4), (1, 4, 4, 2)),
    ),
    # Losses: values, and gradients with respect to logits and to labels.
    *(
        Case(rules, fun, ((4,),), (-4.0, 4.0), ulps=32)
        for rules, fun in [
            ("softmax_cross_entropy", lambda z: losses.softmax_cross_entropy(z, like(z, SOFT))),
            (
                "softmax_cross_entropy_gradient",
                jax.grad(lambda z: losses.softmax_cross_entropy(z, like(z, SOFT))),
            ),
            ("sigmoid_cross_entropy", lambda z: losses.sigmoid_cross_entropy(z, like(z, SOFT))),
            (
                "sigmoid_cross_entropy_gradient",
                jax.grad(lambda z: losses.sigmoid_cross_entropy(z, like(z, SOFT))),
            ),
            ("multiclass_hinge", lambda z: losses.hinge(z, jnp.int32(2))),
            ("multiclass_hinge_gradient", jax.grad(lambda z: losses.hinge(z, jnp.int32(2)))),
        ]
    ),
    Case(
        "binary_hinge",
        lambda z: (losses.hinge(z, jnp.int32(1)), losses.hinge(z, jnp.int32(0))),
        SCALAR,
    ),
    Case("binary_hinge_gradient", jax.grad(lambda z: losses.hinge(z, jnp.int32(1))), SCALAR),
    # Labels that are intervals.
    Case("softmax_cross_entropy", losses.softmax_cross_entropy, ((4,), (4,)), (0.0, 1.0), ulps=32),
    Case(
        "softmax_cross_entropy_gradient",
        jax.grad(losses.softmax_cross_entropy),
        ((4,), (4,)),
        (0.0, 1.0),
        ulps=32,
    ),
    Case("sigmoid_cross_entropy", losses.sigmoid_cross_entropy, ((4,), (4,)), (0.0, 1.0), ulps=32),
    Case(
        "sigmoid_cross_entropy_gradient",
        jax.grad(losses.sigmoid_cross_entropy),
        ((4,), (4,)),
        (0.0, 1.0),
        ulps=32,
    ),
    # Control flow and calls.
    Case("jit", jax.jit(lambda x: 2 * x)),
    Case("remat2", jax.grad(jax.checkpoint(lambda x: jnp.sum(x**3)))),
    Case("custom_jvp_call", lambda x: jax.nn.relu(x)),
    Case("custom_vjp_call", doubled),
    Case("custom_vmap_call", tripled),
    Case("scan", lambda x: lax.scan(lambda c, v: (c + v, c * v), jnp.zeros((), x.dtype), x)),
    Case(
        "scan",
        lambda x: lax.scan(
            lambda c, v: (c * x.sum(), v - c), jnp.ones((), x.dtype), x, reverse=True
        ),
    ),
    Case(
        "while",
        lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * x), (0, x))[1],
    ),
    Case("cond", lambda x: lax.cond(x[0] > 0.5, lambda v: 2 * v, lambda v: -v, x)),
    Case(
        "cond",
        lambda x: lax.switch(jnp.argmax(x), [lambda v: v, jnp.abs, lambda v: v + 1], x),
        ((3,),),
    ),
    Case("exp_neg_sq", jax.grad(lambda x: jnp.sum(lax.erf(x))), domain=(-4.0, 4.0), ulps=2),
]
FUNCTIONS = [  # of newer releases
    Case("one_minus_square", lambda x: lax.one_minus_square(x)),
    Case("log2", lambda x: lax.log2(x), domain=(1e-3, 10.0), ulps=2),
    Case(
        "polynomial",
        lambda x, c: (lax.polynomial(x, [1, -2, 0.5]), lax.polynomial(x, [0, c])),
        ((6,), (6,)),
    ),
]
CASES += [case for case in FUNCTIONS if case.rules not in ABSENT]
IDS = [f"{i}-{case.rules.replace(' ', '-')}" for i, case in enumerate(CASES)]
# What the same primitives are called in other releases of JAX, or under a mesh.
OTHER_NAMES = {
    *(
        "expand_dims",
        "copy_p",
        "pjit",
        "closed_call",
        "core_call",
        "remat",
        "checkpoint",
        "sharding_constraint",
    ),
    *ABSENT,
}


def nested_boxes(case, rng):
    """Boxes [FAMILIES, LEVELS, ...] of each operand, every level inside the next one, the first one
    a point."""
    low_end, high_end = case.domain
    operands = []
    for shape in case.shapes:
        size = (FAMILIES, *shape)
        lower = upper = rng.uniform(low_end, high_end, size).astype(np.float32)
        levels = [(lower, upper)]
        for _ in range(LEVELS - 1):
            # Steps from negligible to huge. Some entries do not grow.
            step = (
                (high_end - low_end)
                * 10.0 ** rng.uniform(-7, 0, (2, *size))
                * (rng.random((2, *size)) < 0.7)
            )
            lower = np.maximum(lower - step[0], np.float32(low_end)).astype(np.float32)
            upper = np.minimum(upper + step[1], np.float32(high_end)).astype(np.float32)
            levels.append((lower, upper))
        operands.append(tuple(np.stack(ends, 1) for ends in zip(*levels, strict=True)))
    return operands


def sample(boxes_, rng, count=POINTS):
    """Samples points [..., count, ...] of each operand in float64, half of them corners."""
    points = []
    for lower, upper in boxes_:
        lead, shape = lower.shape[:2], lower.shape[2:]
        where = rng.random((*lead, count, *shape))
        where[:, :, : count // 2] = where[:, :, : count // 2] > 0.5
        low, high = (np.asarray(end, np.float64)[:, :, None] for end in (lower, upper))
        points.append(np.clip(low + where * (high - low), low, high))
    return points


GROUP = 16  # cases that share a program, because compilation takes most of the time


def evaluated(index):
    """Bounds [FAMILIES, LEVELS, n] in float32 and values [FAMILIES, LEVELS, POINTS, n] in float64
    of a case."""
    return evaluated_together(index // GROUP)[index % GROUP]


@functools.cache
def evaluated_together(group):
    first = group * GROUP
    cases, given, points = CASES[first : first + GROUP], [], []
    for index, case in enumerate(cases, first):
        rng = np.random.default_rng(index)
        given.append(nested_boxes(case, rng))
        points.append([x.reshape(-1, *x.shape[3:]) for x in sample(given[-1], rng)])

    def bounds(case, ends):
        result = jaxdp.interval(case.fun, product=case.product)(
            *(boxes.unchecked(*pair) for pair in ends)
        )
        leaves = jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, jaxdp.Interval))
        return [[end.ravel() for end in (x.lower, x.upper)] for x in leaves]

    def value(case, *operands):
        leaves = jax.tree.leaves((case.exact or case.fun)(*operands))
        return jnp.concatenate([jnp.ravel(x).astype(jnp.float64) for x in leaves])

    def of_all(evaluate, operands):
        return jax.device_get(
            jax.jit(lambda all: [evaluate(*one) for one in zip(cases, all, strict=True)])(operands)
        )

    # One box after the other: the very same program for every box, which is what isotonicity is
    # about.
    flat = [
        [tuple(end.reshape(-1, *end.shape[2:]) for end in pair) for pair in pairs]
        for pairs in given
    ]
    found = of_all(lambda case, ends: lax.map(functools.partial(bounds, case), ends), flat)
    # One point after the other, too: XLA takes long for hundreds of convolutions in one.
    with jax.enable_x64(True):
        values = of_all(lambda case, xs: lax.map(lambda one: value(case, *one), xs), points)
    ends = [
        [np.concatenate([np.float64(pair[i]) for pair in pairs], 1) for i in range(2)]
        for pairs in found
    ]
    return [
        (
            *(end.reshape(FAMILIES, LEVELS, -1) for end in pair),
            x.reshape(FAMILIES, LEVELS, POINTS, -1),
        )
        for pair, x in zip(ends, values, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_every_point_of_a_box_is_inside(index):
    lower, upper, values = evaluated(index)
    assert np.isfinite(values).all()
    assert (lower <= upper).all()
    outside = (values < lower[:, :, None]) | (values > upper[:, :, None])
    assert not outside.any(), f"{outside.sum()} of {outside.size}"


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_a_smaller_box_gives_a_smaller_result(index):
    lower, upper, _ = evaluated(index)
    eps = np.finfo(np.float32).eps * CASES[index].ulps
    least = np.finfo(np.float32).tiny * bool(eps)
    scale = 1 if CASES[index].product == "tight" else np.abs(upper).max()
    for inner, outer in itertools.combinations(range(LEVELS), 2):
        for sign, ends in ((1, lower), (-1, upper)):
            within, around = sign * ends[:, inner], sign * ends[:, outer]
            allowed = eps * np.maximum(np.abs(around), 0 if scale == 1 else scale) + least
            assert (around <= within + np.where(np.isfinite(around), allowed, 0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("index", [i for i, case in enumerate(CASES) if case.tight])
def test_the_box_of_one_point_gives_the_function(index):
    lower, upper, values = evaluated(index)
    value = values[:, 0, 0]
    scale = np.abs(value).max(axis=0) + np.abs(value)
    np.testing.assert_array_less(
        np.maximum(value - lower[:, 0], upper[:, 0] - value), 3e-5 * scale + 1e-30
    )


def applied(case):
    """Names of the rules that a case applies to at least one interval."""
    names = set()

    def record(name, rule, eqn, *operands):
        if any(isinstance(x, jaxdp.Interval) for x in operands):
            names.add(name)
        return rule(eqn, *operands)

    with pytest.MonkeyPatch.context() as patch:
        for name, rule in boxes.RULES.items():
            patch.setitem(boxes.RULES, name, functools.partial(record, name, rule))
        operand = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes]
        jax.eval_shape(
            lambda *xs: jaxdp.interval(case.fun, product=case.product)(
                *(boxes.unchecked(x, x) for x in xs)
            ),
            *operand,
        )
    return names


@pytest.mark.slow
def test_every_rule_has_a_case():
    covered = set()
    for case in CASES:
        names = applied(case)
        assert set(case.rules.split()) - ABSENT <= names, (case.rules, names)
        covered |= names
    assert set(boxes.RULES) - covered == OTHER_NAMES
    assert intervals.RULES is boxes.RULES
