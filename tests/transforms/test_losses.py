"""Losses of one example against independent float64 computations."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import jaxdp
from jaxdp.transforms import losses

RNG = np.random.default_rng(0)
CLASSES = 5
LOGITS = [RNG.normal(size=CLASSES) * scale for scale in (0.1, 1.0, 10.0, 100.0)]
SOFT = RNG.dirichlet(np.ones(CLASSES))


def xent64(z, y):
    """Computes the cross-entropy in float64. `y` is an integer class or probabilities."""
    return float(np.sum((np.eye(len(z))[y] if np.ndim(y) == 0 else y) * (special.logsumexp(z) - z)))


def bce64(z, y):
    return float(np.sum(-y * special.log_expit(z) - (1 - y) * special.log_expit(-z)))


def squared64(z, y):
    return float(np.sum((z - y) ** 2))


def absolute64(z, y):
    return float(np.sum(abs(z - y)))


def hinge64(z, y):
    if np.size(z) == 1:
        return float(max(0.0, 1 - (1 if y > 0 else -1) * np.ravel(z)[0]))
    y = int(np.argmax(y)) if np.ndim(y) else int(y)
    return max(0.0, 1 + max(z[k] for k in range(len(z)) if k != y) - z[y])


CASES = [
    *[
        (losses.softmax_cross_entropy, xent64, z, y)
        for z in LOGITS
        for y in (0, 3, SOFT, 2.5 * SOFT)
    ],
    *[
        (losses.sigmoid_cross_entropy, bce64, z, y)
        for z in LOGITS
        for y in (SOFT, np.eye(CLASSES)[1])
    ],
    *[
        (losses.sigmoid_cross_entropy, bce64, np.float64(z), y)
        for z in (-40.0, -1.3, 0.2, 40.0)
        for y in (0, 0.3, 1)
    ],
    (losses.sigmoid_cross_entropy, bce64, np.array([0.7]), 1),
    *[(losses.squared_error, squared64, z, SOFT) for z in LOGITS],
    (losses.squared_error, squared64, np.float64(0.7), 2.0),
    (losses.absolute_error, absolute64, LOGITS[1], SOFT),
    (losses.squared_error, squared64, RNG.normal(size=(2, 3)), np.ones((2, 3))),
    *[(losses.hinge, hinge64, z, y) for z in LOGITS for y in (0, 3, np.eye(CLASSES)[2])],
    *[(losses.hinge, hinge64, np.float64(z), y) for z in (-3.0, 0.4, 3.0) for y in (-1, 0, 1)],
    (losses.hinge, hinge64, np.array([0.7]), 1),
]
IDS = [f"{case[0].__name__}-{i}" for i, case in enumerate(CASES)]


def finite_difference(fun, z, step=1e-6):
    z = np.asarray(z, np.float64)
    out = np.zeros(z.size)
    for i in range(z.size):
        shift = np.zeros(z.size)
        shift[i] = step
        shift = shift.reshape(z.shape)
        out[i] = (fun(z + shift) - fun(z - shift)) / (2 * step)
    return out.reshape(z.shape)


@functools.cache
def value_of(loss):
    """Returns a loss that is one program for all values of one shape."""
    return jax.jit(loss)


@functools.cache
def value_and_grad_of(loss):
    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "reference", "z", "y"), CASES, ids=IDS)
def test_value_in_float32_equals_float64(loss, reference, z, y):
    value = value_of(loss)(jnp.asarray(z, jnp.float32), jnp.asarray(y))
    assert value.shape == () and value.dtype == jnp.float32
    exact = reference(np.float64(np.float32(z)), y)
    np.testing.assert_allclose(value, exact, rtol=3e-6, atol=3e-6 * max(1.0, np.abs(z).max()))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "reference", "z", "y"), CASES, ids=IDS)
def test_gradient_in_float64_equals_finite_differences(loss, reference, z, y):
    with jax.enable_x64(True):
        value, grad = value_and_grad_of(loss)(jnp.asarray(z, jnp.float64), jnp.asarray(y))
    assert value.dtype == grad.dtype == np.float64
    np.testing.assert_allclose(value, reference(z, y), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        grad, finite_difference(lambda x: reference(x, y), z), rtol=1e-6, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "reference"),
    [
        (losses.softmax_cross_entropy, xent64),
        (losses.sigmoid_cross_entropy, bce64),
        (losses.squared_error, squared64),
        (losses.absolute_error, absolute64),
    ],
)
def test_gradient_with_respect_to_a_soft_label(loss, reference):
    with jax.enable_x64(True):
        grad = jax.jit(jax.grad(loss, argnums=1))(jnp.asarray(LOGITS[1]), jnp.asarray(SOFT))
    np.testing.assert_allclose(
        grad, finite_difference(lambda y: reference(LOGITS[1], y), SOFT), atol=1e-7
    )


@pytest.mark.parametrize("label", [2, np.eye(3)[2]])
@pytest.mark.parametrize("loss", [losses.softmax_cross_entropy, losses.hinge])
def test_one_hot_and_integer_labels_agree(loss, label):
    z = jnp.asarray([0.3, -1.0, 0.9])
    np.testing.assert_array_equal(loss(z, jnp.asarray(label)), loss(z, jnp.asarray(2, jnp.uint8)))


def test_closed_forms():
    z = jnp.asarray([0.3, -1.0, 2.0])
    np.testing.assert_allclose(
        jax.grad(losses.softmax_cross_entropy)(z, jnp.asarray(1)),
        special.softmax(z) - np.eye(3)[1],
        rtol=1e-6,
    )
    np.testing.assert_array_equal(jax.grad(losses.hinge)(z, jnp.asarray(0)), [-1.0, 0.0, 1.0])
    np.testing.assert_array_equal(jax.grad(losses.hinge)(z, jnp.asarray(2)), [0.0, 0.0, 0.0])


@pytest.mark.slow
@pytest.mark.parametrize("loss", [losses.softmax_cross_entropy, losses.hinge, losses.squared_error])
def test_vmap_of_value_and_grad_under_jit_is_a_loop(loss):
    z = RNG.normal(size=(6, CLASSES)).astype(np.float32)
    y = RNG.integers(0, CLASSES, 6).astype(np.int32)
    if loss is losses.squared_error:
        y = np.eye(CLASSES, dtype=np.float32)[y]
    values, grads = jax.jit(jax.vmap(jax.value_and_grad(loss)))(z, y)
    for i in range(6):
        value, grad = value_and_grad_of(loss)(z[i], y[i])
        np.testing.assert_allclose(values[i], value, rtol=1e-6)
        np.testing.assert_allclose(grads[i], grad, rtol=1e-6, atol=1e-7)


def test_sigmoid_cross_entropy_through_a_linear_model():
    w = jnp.asarray([0.5, -0.25])
    x, y = jnp.asarray(RNG.normal(size=(4, 2)), jnp.float32), jnp.asarray([0, 1, 1, 0])
    loss = lambda w, x, y: losses.sigmoid_cross_entropy(x @ w, y)  # noqa: E731
    grads = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))(w, x, y)
    expected = (special.expit(np.float64(x) @ np.float64(w)) - np.asarray(y))[:, None] * np.float64(
        x
    )
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_bfloat16_logits_are_accumulated_in_float32_and_get_a_bfloat16_gradient():
    z = jnp.asarray(RNG.normal(size=1000), jnp.bfloat16)
    value, grad = value_and_grad_of(losses.softmax_cross_entropy)(z, jnp.asarray(7))
    exact = xent64(np.asarray(z, np.float64), 7)
    assert value.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, exact, rtol=1e-6)  # bfloat16 sums would be off by 1e-2
    expected = special.softmax(np.asarray(z, np.float64)) - np.eye(1000)[7]
    np.testing.assert_allclose(np.asarray(grad, np.float64), expected, rtol=2**-8, atol=1e-9)


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_extreme_logits_stay_finite(size):
    z, one = jnp.asarray([size, -size, 0.0]), jnp.asarray(1)
    for loss in (losses.softmax_cross_entropy, losses.hinge):
        value, grad = value_and_grad_of(loss)(z, one)
        np.testing.assert_allclose(value, 2 * size + (loss is losses.hinge), rtol=1e-6)
        np.testing.assert_array_equal(grad, [1.0, -1.0, 0.0])
        value, grad = value_and_grad_of(loss)(z, jnp.asarray(0))
        assert value == 0 and not np.any(grad)
    for label, sign in ((0, 1.0), (1, -1.0)):
        value, grad = value_and_grad_of(losses.sigmoid_cross_entropy)(
            jnp.asarray(sign * size), label
        )
        assert value == np.float32(size) and grad == sign
        value, grad = value_and_grad_of(losses.sigmoid_cross_entropy)(
            jnp.asarray(-sign * size), label
        )
        assert value == 0 and grad == 0


def test_small_losses_keep_their_relative_precision():
    value = losses.sigmoid_cross_entropy(jnp.asarray(20.0), jnp.asarray(1))
    np.testing.assert_allclose(value, math.log1p(math.exp(-20.0)), rtol=1e-6)


def test_a_class_of_probability_zero_is_ignored_unless_it_is_the_label():
    z = jnp.asarray([1.0, -jnp.inf, 2.0])
    value, grad = jax.value_and_grad(losses.softmax_cross_entropy)(z, jnp.asarray(0))
    np.testing.assert_allclose(value, xent64(np.array([1.0, 2.0]), 0), rtol=1e-6)
    np.testing.assert_allclose(grad, [special.expit(-1.0) - 1, 0, special.expit(1.0)], rtol=1e-6)
    assert losses.softmax_cross_entropy(z, jnp.asarray(1)) == jnp.inf
    assert losses.hinge(jnp.asarray([1.0, -jnp.inf]), jnp.asarray(0)) == 0
    assert losses.hinge(jnp.asarray([-jnp.inf, 1.0]), jnp.asarray(1)) == 0


@pytest.mark.parametrize(
    ("loss", "z", "y"),
    [
        (losses.softmax_cross_entropy, [np.nan, 1.0, 2.0], 1),
        (losses.softmax_cross_entropy, [0.0, 1.0, 2.0], [np.nan, 0.0, 1.0]),
        (losses.sigmoid_cross_entropy, np.nan, 1.0),
        (losses.sigmoid_cross_entropy, 1.0, np.nan),
        (losses.squared_error, [np.nan, 1.0], [0.0, 1.0]),
        (losses.absolute_error, [np.nan, 1.0], [0.0, 1.0]),
        (losses.hinge, [np.nan, 1.0, 2.0], 1),
        (losses.hinge, [0.0, 1.0, 5.0], [0.0, np.nan, 1.0]),
        (losses.hinge, np.nan, 1),
        (losses.hinge, 3.0, np.nan),
    ],
)
def test_nan_propagates_to_value_and_gradient(loss, z, y):
    value, grad = value_and_grad_of(loss)(jnp.asarray(z), jnp.asarray(y))
    assert np.isnan(value) and np.isnan(grad).any()


@pytest.mark.parametrize("loss", [losses.softmax_cross_entropy, losses.hinge])
@pytest.mark.parametrize("label", [-1, 3])
def test_a_class_that_does_not_exist_is_nan(loss, label):
    value, grad = value_and_grad_of(loss)(jnp.zeros(3), jnp.asarray(label))
    assert np.isnan(value) and np.isnan(grad).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "z", "y", "match"),
    [
        (losses.softmax_cross_entropy, jnp.zeros((2, 3)), jnp.asarray(1), "Use jax.vmap"),
        (losses.softmax_cross_entropy, jnp.zeros(()), jnp.asarray(1), "Use jax.vmap"),
        (losses.softmax_cross_entropy, jnp.zeros(3), jnp.zeros(4), r"shape \(3,\)"),
        (losses.softmax_cross_entropy, jnp.zeros(3), jnp.asarray(1.0), "integer class"),
        (losses.hinge, jnp.zeros((2, 3)), jnp.asarray(1), "Use jax.vmap"),
        (losses.hinge, jnp.zeros(1), jnp.zeros(2), "of the logits, got"),
        (losses.sigmoid_cross_entropy, jnp.zeros(3), jnp.asarray(1), "of the logits, got"),
        (losses.squared_error, jnp.zeros(3), jnp.zeros((3, 1)), "of the logits, got"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(loss, z, y, match):
    with pytest.raises(ValueError, match=match):
        loss(z, y)


@pytest.mark.slow
def test_public_alias():
    assert jaxdp.losses is losses
