"""Correlated noise is C^-1 Z, and its event has the sensitivity of C for the stated steps."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy.matrix_factorization import toeplitz

import jaxdp
from jaxdp.transforms import noise as noises
from jaxdp.transforms.noise import correlated, gaussian, stream
from tests.transforms.mechanisms import BANDED, STEPS, STRATEGIES, matrix_of

KEY = stream(bytes(range(16)), "test")
SIZES = {"a": (30, 10), "b": (7,)}
SUMS = {name: np.zeros(shape, np.float32) for name, shape in SIZES.items()}


def noise_of(name, **pattern):
    return correlated(STRATEGIES[name], **{"steps": STEPS, **pattern}, inverse=name == "inverse")


def brute_force(matrix, most, separation):
    """The largest norm of C G over all patterns of steps, for gradients of norm 1."""
    gram = np.abs(matrix.T @ matrix)
    largest = 0.0
    for count in range(1, most + 1):
        for steps in itertools.combinations(range(len(matrix)), count):
            if all(later - earlier >= separation for earlier, later in itertools.pairwise(steps)):
                largest = max(largest, gram[np.ix_(steps, steps)].sum())
    return np.sqrt(largest)


# Its bound takes jax_privacy's dynamic programs.
PATTERNED = [
    pytest.param(name, marks=pytest.mark.slow if name == "signs" else ()) for name in STRATEGIES
]


@pytest.mark.parametrize("name", PATTERNED)
@pytest.mark.parametrize("most, separation", [(1, STEPS), (2, 3), (3, 2), (4, 1)])
def test_the_sensitivity_is_that_of_the_worst_pattern(name, most, separation):
    strategy = STRATEGIES[name]
    noise = noise_of(name, participations=most, min_separation=separation)
    expected = brute_force(matrix_of(strategy), most, separation)
    assert noise.event(2.0).noise_multiplier == pytest.approx(2.0 / noise.sensitivity)
    if name == "signs":
        # Its bound is exact where no two columns of a unit overlap.
        exact = most == 1 or separation >= len(strategy)
        assert expected * (1 - 1e-9) <= noise.sensitivity <= expected * (1 + 1e-9 if exact else 1.5)
        return
    assert noise.sensitivity == pytest.approx(expected, rel=1e-9)
    # The twin that forgets the k participations.
    if most > 1:
        forgets = noise_of(name)
        assert forgets.sensitivity < expected * 0.9


@jax.jit
def drawn(scale, number):
    """Returns the Z of a step, by one program for all strategies."""
    return gaussian(KEY, SUMS, scale, number=number)


@functools.cache
def released(name, sigma=1.5):
    """The noise of each step, float64 [steps, values], and the Z of the same key."""
    noise = noise_of(name)
    privatizer = jaxdp.privatize(2.0, noise_multiplier=sigma, divisor=1.0, key=KEY, noise=noise)
    update = jax.jit(privatizer.update)
    state = privatizer.init(SUMS)
    rows, fresh = [], []
    for step in range(STEPS):
        mean, state = update(SUMS, state)
        rows.append(flat(mean))
        fresh.append(flat(drawn(2.0 * sigma, step)))
    assert int(state.step) == STEPS
    return np.stack(rows), np.stack(fresh)


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_noise_solves_the_strategy(name):
    rows, fresh = released(name)
    expected = np.linalg.solve(matrix_of(STRATEGIES[name]), fresh)
    np.testing.assert_allclose(rows, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_the_error_is_that_of_jax_privacy():
    noise = correlated(BANDED, steps=STEPS, participations=2, min_separation=4)
    inverse = np.linalg.inv(matrix_of(BANDED))
    prefix = np.tri(STEPS) @ inverse
    expected = noise.sensitivity**2 * np.square(prefix).sum(axis=1)
    np.testing.assert_allclose(noise.error(), expected, rtol=1e-9)
    single = correlated(BANDED, steps=STEPS)
    with jax.enable_x64(True):
        theirs = toeplitz.loss(jnp.asarray(single.strategy.bands), STEPS)
    np.testing.assert_allclose(single.error().mean(), float(theirs), rtol=1e-9)


@pytest.mark.slow
def test_an_update_after_the_last_step_has_no_value():
    noise = correlated(BANDED, steps=1)
    privatizer = jaxdp.privatize(1.0, noise_multiplier=1.0, divisor=1.0, key=KEY, noise=noise)
    sums, update = {"w": np.zeros(2, np.float32)}, jax.jit(privatizer.update)
    mean, state = update(sums, privatizer.init(sums))
    assert np.isfinite(mean["w"]).all()
    with pytest.raises(ValueError, match="step must be below 1, got 1"):
        privatizer.update(sums, state)
    mean, _ = update(sums, state)
    assert np.isnan(mean["w"]).all()
    with pytest.raises(ValueError, match="step must be below 1, got 1"):
        privatizer.check_step(1)


@pytest.mark.slow
def test_the_buffers_are_updated_in_place():
    noise = correlated(BANDED, steps=STEPS)
    privatizer = jaxdp.privatize(1.0, noise_multiplier=1.0, divisor=1.0, key=KEY, noise=noise)

    def update(buffers, sums):
        state = noises.PrivatizeState(KEY, jnp.int32(5), buffers)
        mean, state = privatizer.update(sums, state)
        return mean, state.buffers

    shapes = jax.eval_shape(lambda: privatizer.init_buffers(SUMS))
    program = jax.jit(update, donate_argnums=0).lower(shapes, SUMS).compile()
    size = sum(x.size * 4 for x in jax.tree.leaves(shapes))
    assert size == 3 * 4 * 307
    assert program.memory_analysis().alias_size_in_bytes >= size


WRONG = [
    (
        ValueError,
        {"strategy": [1e-3, -1e3], "steps": 40, "inverse": True},
        "must have a finite sensitivity",
    ),
    (TypeError, {"strategy": "banded"}, "strategy must be the coefficients"),
    (ValueError, {"strategy": np.eye(2)}, "one-dimensional"),
    (ValueError, {"strategy": [0.0, 1.0]}, "begin with a positive coefficient"),
    (ValueError, {"strategy": [1.0, np.nan]}, "finite in float32"),
    (ValueError, {"steps": 0}, "steps must be"),
    (ValueError, {"participations": 0}, "participations must be"),
    (ValueError, {"participations": 2, "min_separation": 0}, "min_separation must be"),
    (ValueError, {"strategy": [1.0, -0.5], "steps": 5000}, "non-negative coefficients"),
]


@pytest.mark.parametrize("error, arguments, text", WRONG)
def test_wrong_arguments(error, arguments, text):
    with pytest.raises(error, match=text):
        correlated(**{"strategy": BANDED, "steps": STEPS, **arguments})


def test_privatize_refuses_what_has_no_event():
    noise = correlated(BANDED, steps=STEPS)
    with pytest.raises(ValueError, match="noise_multiplier must be a number"):
        jaxdp.privatize(1.0, noise_multiplier=lambda t: 1.0, divisor=1.0, noise=noise)
    with pytest.raises(TypeError, match="noise must be jaxdp"):
        jaxdp.privatize(1.0, noise_multiplier=1.0, divisor=1.0, noise=BANDED)
    with pytest.raises(ValueError, match="exact must be False with correlated noise"):
        jaxdp.privatize(1.0, noise_multiplier=1.0, divisor=1.0, noise=noise, exact=True)
    privatizer = jaxdp.privatize(1.0, noise_multiplier=1.0, divisor=1.0, noise=noise)
    for event in (lambda: privatizer.event, lambda: privatizer.event_at(0)):
        with pytest.raises(ValueError, match="an update has no event of its own"):
            event()
