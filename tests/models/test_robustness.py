"""Robust accuracy against a plain loop, the scale of its noise, and rho where it is known
exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import data
from jaxdp.pretrain import parameter_robustness, robust_accuracy

SOURCE = data.bundled("blobs").take(np.arange(103))
RNG = np.random.default_rng(0)
PARAMS = {
    "w": jnp.asarray(np.array([[1.0, -1, -1, 1], [1, 1, -1, -1]]), jnp.float32),
    "b": jnp.asarray(0.1 * RNG.normal(size=4), jnp.float32),
}


def predict(params, inputs):
    return inputs @ params["w"] + params["b"][None]


SEEN = []


# One function for all calls, which compiles once for each shape.
def spy(params, inputs):
    jax.debug.callback(lambda p: SEEN.append(jax.tree.map(np.asarray, p)), params, ordered=False)
    return predict(params, inputs) if "b" in params else large(params, inputs)


def capture(params, inputs, **options):
    """The parameters that robust_accuracy evaluates, by way of a model that reports them."""
    SEEN.clear()
    robust_accuracy(spy, params, inputs, draws_per_call=1, **options)
    jax.effects_barrier()
    return SEEN.copy()


@pytest.mark.slow
@pytest.mark.parametrize("relative", [False, True])
def test_it_is_the_accuracy_of_perturbed_models(relative):
    rows = SOURCE.gather(np.arange(len(SOURCE)))
    expected = []
    for model in capture(PARAMS, SOURCE, std=0.5, draws=3, relative=relative, batch_size=103):
        logits = rows["features"] @ model["w"] + model["b"]
        expected.append((logits.argmax(-1) == rows["label"]).mean())
    found = robust_accuracy(
        predict, PARAMS, SOURCE, std=0.5, draws=3, relative=relative, batch_size=103
    )
    assert len(set(expected)) == 3
    np.testing.assert_allclose(found, expected, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("draws_per_call", [2, 100])
def test_how_the_work_is_cut_changes_nothing(draws_per_call):
    options = {"std": (0.0, 0.5, 1.0), "draws": 5}
    found = robust_accuracy(
        predict, PARAMS, SOURCE, batch_size=20, draws_per_call=draws_per_call, **options
    )
    whole = robust_accuracy(predict, PARAMS, SOURCE, **options)
    assert found.shape == (3, 5) and found.dtype == np.float64
    np.testing.assert_array_equal(found, whole)
    for i, std in enumerate(options["std"]):
        np.testing.assert_array_equal(
            robust_accuracy(predict, PARAMS, SOURCE, std=std, draws=5), whole[i]
        )


def test_both_kinds_of_noise_are_one_program():
    traces = []

    def traced(params, inputs):
        traces.append(len(inputs))
        return predict(params, inputs)

    for relative in (False, True):
        robust_accuracy(traced, PARAMS, SOURCE, std=0.5, draws=1, relative=relative)
    assert len(traces) == 1


def test_no_noise_is_the_accuracy_and_much_noise_is_chance():
    rows = SOURCE.gather(np.arange(len(SOURCE)))
    clean = (np.asarray(predict(PARAMS, rows["features"])).argmax(-1) == rows["label"]).mean()
    found = robust_accuracy(predict, PARAMS, SOURCE, std=(0.0, 100.0), draws=40)
    np.testing.assert_allclose(found[0], clean, atol=1e-7)
    # The mean over draws of the accuracy of a random linear model on four symmetric blobs is 1/4.
    assert abs(found[1].mean() - 0.25) < 5 * 0.25 / np.sqrt(40)


@pytest.mark.slow
def test_seeds_differ_and_draws_do_not_depend_on_the_data():
    one, two = (robust_accuracy(predict, PARAMS, SOURCE, std=1.0, seed=seed) for seed in (0, 1))
    assert one.shape == (10,) and not np.array_equal(one, two)
    first, second = (
        capture(PARAMS, source, std=1.0, draws=1) for source in (SOURCE, SOURCE.take(np.arange(7)))
    )
    np.testing.assert_array_equal(first[0]["w"], second[0]["w"])


LARGE = {
    "w": jax.device_put(np.full((50, 100), 3, np.float32)),
    "v": jax.device_put(np.tile(np.float32([[1, -7]]), (1000, 1))),
    "zero": jax.device_put(np.zeros(1000, np.float32)),
}


def large(params, inputs):
    return jnp.zeros((inputs.shape[0], 4)) + 0 * params["w"].sum()


@pytest.mark.slow
@pytest.mark.parametrize("relative", [False, True])
def test_the_noise_has_the_standard_deviation_that_is_asked_for(relative):
    """The sum of n squares over n deviates from its mean by 5 sqrt(2 / n) once in two million
    tests."""
    seen = capture(LARGE, SOURCE.take(np.arange(1)), std=0.2, draws=2, relative=relative)
    rms = {"w": 3.0, "v": 5.0, "zero": 0.0} if relative else {"w": 1.0, "v": 1.0, "zero": 1.0}
    assert len(seen) == 2
    for name, scale in rms.items():
        noise = np.stack(
            [np.asarray(model[name], np.float64) - np.asarray(LARGE[name]) for model in seen]
        )
        if scale == 0:
            assert not noise.any()
            continue

        def plausible(std, noise=noise):
            return abs(np.mean((noise / std) ** 2) - 1) < 5 * np.sqrt(2 / noise.size)

        assert plausible(0.2 * scale)
        assert not plausible(0.7 * 0.2 * scale) and not plausible(1.3 * 0.2 * scale)
        assert abs(noise.mean()) < 5 * 0.2 * scale / np.sqrt(noise.size)
        assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 5 / np.sqrt(
            noise[0].size
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": -0.1}, "std must be finite and at least 0, one number or several, got -0.1"),
        ({"std": (0.1, float("nan"))}, "std must be finite"),
        ({"std": ()}, "std must be finite"),
        ({"draws": 0}, "draws and draws_per_call must be at least 1, got 0 and None"),
        ({"draws_per_call": 0}, "draws and draws_per_call must be at least 1, got 10 and 0"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        robust_accuracy(predict, PARAMS, SOURCE, **options)
    with pytest.raises(ValueError, match="has no examples"):
        robust_accuracy(predict, PARAMS, SOURCE.take(np.zeros(0, np.int64)))


# --- rho ----------------------------------------------------------------------------------------

INPUTS = RNG.normal(size=(11, 2)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [4, 100])
def test_rho_of_a_linear_model(batch_size):
    """Logits x W + b: J J^T = (||x||^2 + 1) I, whatever the parameters."""
    found = parameter_robustness(predict, PARAMS, INPUTS, batch_size=batch_size, iterations=2)
    exact = np.sqrt(np.max(np.sum(INPUTS**2, axis=1)) + 1)
    assert found.local == pytest.approx(exact, rel=1e-5)
    # In twelve dimensions random directions are not far from the worst, and never beyond it.
    assert 0.4 * exact < found.random <= exact * (1 + 1e-4)
    ratios = []
    for model in capture(PARAMS, SOURCE.take(np.arange(1)), std=0.01, draws=10):
        delta = {
            name: np.asarray(model[name], np.float64) - np.asarray(PARAMS[name]) for name in PARAMS
        }
        length = np.sqrt(sum((d**2).sum() for d in delta.values()))
        ratios.append(np.linalg.norm(INPUTS @ delta["w"] + delta["b"], axis=1).max() / length)
    assert found.random == pytest.approx(max(ratios), rel=1e-3)


@pytest.mark.slow
def test_rho_of_a_network_is_the_largest_spectral_norm():
    params = {"u": RNG.normal(size=(2, 6)), "w": RNG.normal(size=(6, 5))}
    params = jax.tree.map(jnp.float32, params)

    def network(params, inputs):
        return jnp.tanh(inputs @ params["u"]) @ params["w"]

    jacobians = jax.jit(lambda x: jax.jacobian(lambda p: network(p, x[None])[0])(params))

    def jacobian(x):
        parts = jacobians(x)
        return np.concatenate([np.asarray(part).reshape(5, -1) for part in parts.values()], axis=1)

    exact = max(np.linalg.norm(jacobian(x), 2) for x in INPUTS)
    found = parameter_robustness(network, params, INPUTS, iterations=200, std=1e-3)
    assert found.local == pytest.approx(exact, rel=1e-3)
    assert found.random <= exact * 1.01
    early = parameter_robustness(network, params, INPUTS, iterations=2)
    assert early.local <= exact * (1 + 1e-5)


@pytest.mark.slow
def test_a_constant_model_does_not_move():
    assert parameter_robustness(large, LARGE, INPUTS, draws=1, iterations=2) == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": 0.0}, "std must be positive and finite, got 0.0"),
        ({"draws": 0}, "draws, iterations and batch_size must be at least 1, got 0, 20 and 32"),
        ({"iterations": 0}, "got 10, 0 and 32"),
        ({"batch_size": 0}, "got 10, 20 and 0"),
    ],
)
def test_rho_of_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        parameter_robustness(predict, PARAMS, INPUTS, **options)
    with pytest.raises(ValueError, match="inputs has no examples"):
        parameter_robustness(predict, PARAMS, INPUTS[:0])
