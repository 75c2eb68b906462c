"""The training loop against a loop over optax.adam, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp.models.training import Training, epoch_batches, fit_in_memory, fit_until_steady

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
# Five examples in batches of two: the last batch of an epoch has one.
DATA = {"x": RNG.normal(size=(5, 3)).astype(np.float32), "y": RNG.normal(size=5).astype(np.float32)}
START = {"w": jnp.array([0.5, -0.2, 0.1]), "b": jnp.float32(0.3)}
FROZEN = jnp.float32(1.7)


def loss(params, frozen, batch, key):
    """A different multiple of the squared error in every step."""
    return (
        jax.random.uniform(key)
        * frozen
        * (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
    )


@pytest.mark.slow
def test_batches_are_all_examples_in_a_new_order():
    draw = jax.jit(epoch_batches, static_argnums=(1, 2))
    for count, size in [(7, 3), (4, 4), (1, 1)]:
        rows, weights, keys = draw(KEY, count, size)
        rows, weights = np.asarray(rows), np.asarray(weights)
        steps = -(-count // size)
        assert rows.shape == weights.shape == (steps, size) and keys.shape == (steps,)
        assert sorted(rows[weights == 1].tolist()) == list(range(count))
        flat = weights.ravel()
        assert flat[:count].min() == 1 and not flat[count:].any()
        # What fills the last batch is from the start of the order.
        assert rows.ravel()[count:].tolist() == rows.ravel()[: steps * size - count].tolist()
        assert len(np.unique(jax.random.key_data(keys), axis=0)) == steps
    orders = {tuple(np.ravel(draw(jax.random.key(k), 7, 3)[0])[:7].tolist()) for k in range(10)}
    assert len(orders) == 10


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, 64])
def test_steps_are_those_of_adam_on_the_mean_over_real_examples(batch_size):
    found = fit_in_memory(
        loss,
        START,
        DATA,
        key=KEY,
        learning_rate=0.05,
        epochs=3,
        batch_size=batch_size,
        frozen=FROZEN,
    )
    optimizer = optax.adam(0.05)

    @jax.jit
    def step(params, state, batch, key):
        gradient = jax.grad(lambda params: loss(params, FROZEN, batch, key).mean())(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params, state = START, optimizer.init(START)
    for epoch_key in jax.random.split(KEY, 3):
        rows, weights, keys = epoch_batches(epoch_key, 5, min(batch_size, 5))
        for of_step, weight, key in zip(np.asarray(rows), np.asarray(weights), keys, strict=True):
            real = of_step[weight > 0]
            params, state = step(
                params, state, {name: column[real] for name, column in DATA.items()}, key
            )
    assert int(state[0].count) == 3 * -(-5 // batch_size)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, params)
    assert not np.allclose(found["w"], START["w"], atol=0.02)


@pytest.mark.slow
def test_one_program_for_all_epochs_rates_keys_and_calls():
    traces = []

    def counted(params, frozen, batch, key):
        traces.append(None)
        return (params - batch) ** 2

    first = fit_in_memory(
        counted, jnp.zeros(()), jnp.ones(4), key=KEY, learning_rate=0.1, epochs=2, batch_size=2
    )
    count = len(traces)
    second = fit_in_memory(
        counted,
        first,
        jnp.ones(4),
        key=jax.random.key(1),
        learning_rate=0.2,
        epochs=3,
        batch_size=2,
    )
    assert len(traces) == count > 0
    assert first == pytest.approx(0.4, abs=1e-2) and second > first
    fit_in_memory(
        counted, jnp.zeros(()), jnp.ones(4), key=KEY, learning_rate=0.1, epochs=1, batch_size=3
    )
    assert len(traces) > count  # The count does count.


def steady(params, frozen, batch, key):
    """A loss that falls to `frozen` and then stays."""
    return jnp.maximum(params, frozen) + 0 * batch


@pytest.mark.slow
def test_training_ends_when_the_loss_does_not_decrease():
    def epochs(patience, most=12):
        training = Training(learning_rate=0.5, epochs=most, batch_size=4, patience=patience)
        # Adam moves by the learning rate, so the loss is 2, 1.5, 1 and then 0.9.
        fitted = fit_until_steady(
            steady,
            jnp.float32(2),
            jnp.ones(4),
            training,
            key=KEY,
            frozen=jnp.float32(0.9),
        )
        return fitted.epochs

    assert [epochs(1), epochs(3)] == [5, 7]
    assert epochs(1, most=3) == 3
    # The twin: without the rule nothing ends it.
    assert epochs(0) == 12
    with pytest.raises(ValueError, match="patience must be at least 0, got -1"):
        epochs(-1)


@pytest.mark.parametrize("name", ["learning_rate", "epochs", "batch_size"])
def test_numbers_must_be_positive(name):
    numbers = {"learning_rate": 0.1, "epochs": 1, "batch_size": 2}
    for value in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"{name} must be positive, got {value}"):
            fit_in_memory(loss, START, DATA, key=KEY, **{**numbers, name: value})


@pytest.mark.slow
def test_no_data_is_refused():
    with pytest.raises(ValueError, match="data must have at least one example, got none"):
        fit_in_memory(
            loss,
            START,
            jax.tree.map(lambda x: x[:0], DATA),
            key=KEY,
            learning_rate=0.1,
            epochs=1,
            batch_size=2,
        )
