"""Audits of a charged accuracy: what keeps its promise passes, what breaks it is caught.

Runs have fixed seeds. Over the choice of a seed, a healthy estimate fails with probability below
0.001, the confidence of the bounds; that broken ones are caught and that much is found fails with
probability of about 0.01."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.audit import accuracy
from jaxdp.data import from_arrays
from jaxdp.privacy import GaussianDpEvent, epsilon

SEED, DELTA = bytes(range(16)), 1e-5
# Of class 0, which is always predicted, are rows 0, 1, 4, 5, ...
SOURCE = from_arrays(
    features=np.ones((40, 1), np.float32), label=np.arange(40) // 2 % 2, num_classes=2
)


def predict(params, inputs):
    return inputs * params[None]


PARAMS = jnp.array([1.0, 0.0])


def audit(*, sigma=1.0, trials=2000, **options):
    options = {"confidence": 0.999, "seed": SEED, "delta": DELTA, **options}
    return accuracy.audit_accuracy(
        predict, PARAMS, SOURCE, noise_multiplier=sigma, trials=trials, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_an_estimate_passes_and_most_of_epsilon_is_found(adjacency):
    found = audit(adjacency=adjacency)
    assert (
        found.upper == pytest.approx(epsilon(GaussianDpEvent(1.0), delta=DELTA))
        and found.trials == 4000
    )
    assert 0.5 * found.upper < found.lower <= found.upper < found.ceiling


@pytest.mark.slow
def test_a_replaced_example_is_charged_twice_what_it_can_show():
    once, replaced = audit(), audit(adjacency="replace_one")
    assert replaced.upper == pytest.approx(epsilon(GaussianDpEvent(0.5), delta=DELTA))
    assert 0.5 * once.upper < replaced.lower <= once.upper


def half_the_noise(key, count, total, sigma, whole=accuracy.noisy_fraction):
    return whole(key, count, total, sigma / 2)


def counted_twice(*args, whole=accuracy.count_correct):
    return 2 * whole(*args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken"), [("noisy_fraction", half_the_noise), ("count_correct", counted_twice)]
)
def test_half_the_noise_and_examples_that_count_twice_are_caught(name, broken, monkeypatch):
    monkeypatch.setattr(accuracy, name, broken)
    assert audit().verdict == "VIOLATED"


def test_candidates_are_tried():
    assert audit(rows=[2, 3, 4]).lower > 0.5 * audit().upper
    with pytest.raises(ValueError, match="rows must name an example that changes the count"):
        audit(rows=[2, 3])  # answered wrong, with or without them
    with pytest.raises(ValueError, match="rows must name an example that changes the count"):
        audit(rows=[0, 1], adjacency="replace_one")


def test_arguments_are_checked():
    for terms, match in [
        ({"trials": 1}, "trials must be at least 2, got 1"),
        ({"rows": []}, "rows must name at least 1 examples under 'add_remove', got 0"),
        (
            {"rows": [0], "adjacency": "replace_one"},
            "rows must name at least 2 examples under 'replace_one', got 1",
        ),
        ({"confidence": 0.4}, "confidence must be"),
        ({"delta": 0.0}, "delta"),
    ]:
        with pytest.raises(ValueError, match=match):
            audit(**terms)
