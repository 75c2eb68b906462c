"""Bounds on training with poisoned, removed and public records, and on dampened and l1-penalised
training: they contain what retraining gives, and smaller boxes do not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.prediction import Bounds, Poisoning, answers, train_with_bounds
from tests.prediction import retraining

N = 24
OWN = {"features": "0", "label": "1"}  # the leaves of (x, y)


def logits(params, x):
    weight, bias = params
    return x @ weight + bias


def bce(params, example):
    return jaxdp.losses.sigmoid_cross_entropy(logits(params, example[0]), example[1])


def mae(params, example):
    return jaxdp.losses.absolute_error(logits(params, example[0]), example[1])


LOSSES = {"bce": bce, "mae": mae}


@functools.cache
def problem(loss="bce"):
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(3, 1)) / np.sqrt(3), 0.1 * rng.normal(size=1)]
    x = np.float32(rng.normal(size=(N, 3)))
    y = x[:, 0] + 0.5 * rng.normal(size=N)
    y = np.float32(y > 0 if loss == "bce" else y)
    return [np.float32(leaf) for leaf in params], x, y


def outside(theta, bounds, k):
    """Returns how many coordinates of `theta` lie outside of the box of k changes."""
    low, high = ([np.asarray(leaf)[k] for leaf in tree] for tree in (bounds.lower, bounds.upper))
    return sum(int(((p < a) | (p > b)).sum()) for p, a, b in zip(theta, low, high, strict=True))


SGD = {"clip": 0.4, "learning_rate": 0.3}
# name: (loss, batch size, epochs, options, what a poisoned record may become)
CASES = {
    "removed": ("bce", 12, 1, SGD | {"momentum": 0.5, "dampening": 0.3, "l1": 0.02}, {}),
    "poisoned": ("bce", 12, 1, SGD, {"radius": 0.2, "labels": (0.0, 1.0)}),
    "targets": ("mae", 24, 2, SGD | {"l1": 0.02}, {"label_radius": 0.5}),
}


def solve(name, **options):
    loss, batch_size, epochs, training, change = CASES[name]
    params, x, y = problem(loss)
    kind = {"threat": "remove"}
    if change:
        kind = {"threat": "poison", "poisoning": Poisoning(**change, **OWN)}
    order = np.tile(np.arange(N).reshape(-1, batch_size), (epochs, 1))
    settings = {"order": order, "batch_size": batch_size, "epochs": epochs, "ks": 4}
    return train_with_bounds(LOSSES[loss], params, (x, y), **settings | training | kind | options)


def changed(rng, change, x, y):
    """Returns extreme changes of all records, most of them at the ends of their boxes."""
    sign = rng.choice([-1, 1], size=x.shape)
    if rng.random() < 0.3:
        sign = rng.uniform(-1, 1, x.shape)
    x = np.float64(x) + change.get("radius", 0) * sign
    y = np.float64(y) + change.get("label_radius", 0) * rng.choice([-1, 1], size=len(y))
    return x, 1 - y if "labels" in change else y


def witnesses(name, trials=150, **larger):
    """Yields (k, parameters) of trainings in float64 and float32 with at most k changed records.

    Half of them change the records whose gradients move most along a random direction. `larger` is
    a change that the bounds do not cover."""
    loss, batch_size, epochs, training, change = CASES[name]
    params, x, y = problem(loss)
    rng = np.random.default_rng(1)
    batches = list(np.tile(np.arange(N).reshape(-1, batch_size), (epochs, 1)))
    before = retraining.clipped(params, x, y, loss, SGD["clip"])
    for trial in range(trials):
        k = int(rng.integers(1, 5))
        new_x, new_y = changed(rng, change | larger, x, y)
        after = retraining.clipped(params, new_x, new_y, loss, SGD["clip"]) if change else 0
        gain = (before - after) @ rng.normal(size=before.shape[1])
        who = np.argsort(gain)[:k] if trial % 2 else rng.choice(N, k, replace=False)
        data, rows = (x.astype(np.float64), y.astype(np.float64)), batches
        if change:
            data[0][who], data[1][who] = new_x[who], new_y[who]
        else:
            rows = [np.setdiff1d(batch, who) for batch in batches]
        for dtype in (np.float64, np.float32):
            options = {"loss": loss, "divisor": batch_size, "dtype": dtype, **training}
            yield k, retraining.train(params, *data, rows, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_retrained_parameters_are_inside(name):
    bounds, beyond = solve(name), 0
    for k, theta in witnesses(name):
        assert outside(theta, bounds, k) == 0
        beyond += outside(theta, bounds, k - 1) > 0
    assert beyond > 0  # bounds for one change less do not contain them all
    assert outside(map(np.asarray, bounds.params), bounds, 0) == 0
    if name == "targets":
        assert any(outside(theta, bounds, k) for k, theta in witnesses(name, 20, label_radius=2.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["removed", "targets"])
def test_one_step_is_the_float64_formula(name):
    loss, _, _, training, change = CASES[name]
    params, x, y = problem(loss)
    bounds = solve(name, order=np.arange(N)[None], batch_size=N, epochs=1)
    clip, rate = SGD["clip"], SGD["learning_rate"]
    d = retraining.clipped(params, np.float64(x), np.float64(y), loss, clip)  # [N, P]
    if change:
        moved = [
            retraining.clipped(params, np.float64(x), np.float64(y) + sign * r, loss, clip)
            for sign in (-1, 1)
            for r in (change["label_radius"],)
        ]
        least, most = np.minimum(*moved), np.maximum(*moved)
    else:
        least = most = 0 * d
    start = np.concatenate([np.float64(leaf).ravel() for leaf in params])
    for k in range(5):
        gains = np.sort(np.maximum(d - least, 0), axis=0)[::-1][:k].sum(axis=0)
        losses = np.sort(np.maximum(most - d, 0), axis=0)[::-1][:k].sum(axis=0)
        for tree, total in (
            (bounds.upper, d.sum(axis=0) - gains),
            (bounds.lower, d.sum(axis=0) + losses),
        ):
            theta = start - rate * total / N
            theta = np.sign(theta) * np.maximum(abs(theta) - rate * training["l1"], 0)
            ours = np.concatenate([np.asarray(leaf)[k].ravel() for leaf in tree])
            np.testing.assert_allclose(ours, theta, rtol=0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("threat", ["replace_one", "replace_per_batch", "targets"])
def test_public_records_do_not_change(threat):
    """Two records of the batch may change, so more changes than two are two."""
    loss = "mae" if threat == "targets" else "bce"
    params, x, y = problem(loss)
    # An absolute error changes its gradient only if the target passes the prediction.
    nearest = np.argsort(abs(x @ params[0][:, 0] + params[1] - y))
    public = ~np.isin(np.arange(N), nearest[:2])
    order = {"order": np.arange(N)[None], "batch_size": N, "epochs": 1}
    if threat == "targets":
        bounds = solve(threat, public=public, **order)
        options = {"l1": 0.02}
    else:
        settings = SGD | order | {"threat": threat, "ks": 4, "public": public}
        bounds = train_with_bounds(bce, params, (x, y), **settings)
        options = {}
    ends = [np.asarray(leaf) for leaf in (*bounds.lower, *bounds.upper)]
    for leaf in ends:
        np.testing.assert_allclose(leaf[2], leaf[3:].mean(axis=0), atol=1e-6)
    assert any((leaf[1] != leaf[2]).any() for leaf in ends)

    def retrain(who):
        """Changes both records of `who` in all directions, and returns who leaves the box of 2."""
        escaped = 0
        for trial in range(20):
            data = np.float64(x), np.float64(y)
            rng = np.random.default_rng(trial)
            if threat == "targets":
                data[1][who] += 0.5 * rng.choice([-1, 1], size=2)
            else:
                data[0][who] *= 100 * rng.choice([-1, 1], size=(2, 3))
            theta = retraining.train(
                params, *data, [np.arange(N)], loss=loss, divisor=N, **SGD | options
            )
            escaped += outside(theta, bounds, 2) > 0
        return escaped

    assert retrain(nearest[:2]) == 0
    assert retrain(nearest[2:4]) > 0  # the twin: these are public


def test_private_answers_refuse_changes_that_are_no_neighbours():
    class Account:
        name, adjacency = "data", "add_remove"

    params, zeros = problem()[0], [np.zeros((1, *leaf.shape)) for leaf in problem()[0]]
    for threat in ("remove", "poison"):
        bounds = Bounds(params, zeros, zeros, (0,), threat, (True,) * len(params))
        with pytest.raises(ValueError, match=f"threat='{threat}' cover"):
            answers._certified_steps([bounds], Account(), fixed_parts=False)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"radius": -1.0}, "radius must be finite and >= 0, got -1.0"),
        ({"label_radius": np.inf}, "label_radius must be finite"),
        ({"labels": [0, 1]}, "labels must be a tuple"),
        ({"labels": (0, 1), "label_radius": 0.1}, "exclude each other"),
        ({}, "change no record"),
        # Before, the label's radius of 0 replaced the one of the features: nothing moved.
        ({"radius": 0.1, "features": "label"}, "are one leaf, which cannot move as both"),
    ],
)
def test_bad_poisoning(options, match):
    with pytest.raises(ValueError, match=match):
        Poisoning(**options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("field", ["features", "label"])
def test_a_moved_feature_or_label_may_be_almost_zero(field, dtype):
    other = jnp.int32(1)
    for radius in (0.7, 0.1, 0.3, 1e-3, 5.0):
        x = jnp.asarray([radius, -radius, 1.0], dtype)
        if field == "features":
            moved = Poisoning(radius=radius).results({"features": x, "label": other})["features"]
        else:
            moved = Poisoning(label_radius=radius).results({"features": other, "label": x})["label"]
        exact = np.asarray(x, np.float64)
        assert (np.asarray(moved.lower[0], np.float64) <= exact - radius).all()
        assert (np.asarray(moved.upper[0], np.float64) >= exact + radius).all()


@pytest.mark.parametrize(
    ("poisoning", "match"),
    [
        (Poisoning(radius=0.1, features="2"), r"features='2' must be one of the leaves"),
        (Poisoning(radius=0.1, features="1"), "the leaf 1 is int32. Only floating-point"),
        (Poisoning(labels=(0,), label="y"), "label='y' must be one of the leaves"),
        (Poisoning(labels=(0.5,), label="1"), r"labels=\(0.5,\) must be integers"),
    ],
)
def test_a_poisoning_that_does_not_fit_the_records(poisoning, match):
    record = jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    with pytest.raises(ValueError, match=match):
        poisoning.check(record)
