"""The audit of a charged accuracy. The model has two classes and is right on a quarter of the examples."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import Audit
from jaxdp.audit import accuracy as auditing
from jaxdp.data import from_arrays
from jaxdp.privacy import GaussianDpEvent
from jaxdp.release import claim

from . import case
from .case import Case, Run, under

SIGMA, DELTA = 1.0, 1e-5
EXAMPLES = from_arrays(features=np.ones((40, 1), np.float32), label=np.minimum(np.arange(40) % 4, 1), num_classes=2)
CLAIMED = claim(GaussianDpEvent(SIGMA), adjacency="add_remove", delta=DELTA)


def predict(params: Any, inputs: jax.Array) -> jax.Array:
    """Returns logits that predict the first class for every input."""
    return inputs * jnp.array([[1.0, 0.0]])


def estimates(sigma: float = SIGMA, patch: Callable[[], Any] = contextlib.nullcontext) -> Run:
    """Returns the audit of an accuracy under the honest claim, with something patched."""

    def run(trials: int, seed: bytes) -> Audit:
        terms: dict[str, Any] = {"delta": DELTA, "rows": [0, 1], "confidence": case.CONFIDENCE, "seed": seed}
        with patch():
            found = auditing.audit_accuracy(predict, None, EXAMPLES, noise_multiplier=sigma, trials=trials, **terms)
        return under(found, CLAIMED)

    return run


def count_twice(*args: Any, whole: Callable[..., int] = auditing.count_correct) -> int:
    """Counts every example twice."""
    return 2 * whole(*args)


def with_one_key(key: jax.Array, *args: Any, whole: Callable[..., Any] = auditing.noisy_fraction) -> jax.Array:
    """Draws the noise of all estimates from one key."""
    return whole(jax.random.key(0, impl="threefry2x32"), *args)


TWINS: Mapping[str, Run | str] = {
    case.HALF_THE_NOISE: estimates(SIGMA / 2),
    case.NO_CLIPPING: "an example adds 0 or 1 to the count: there is no clip",
    case.SENSITIVITY_OFF_BY_TWO: estimates(patch=lambda: mock.patch.object(auditing, "count_correct", count_twice)),
    case.REUSED_KEY: estimates(patch=lambda: mock.patch.object(auditing, "noisy_fraction", with_one_key)),
    case.ADD_REMOVE_FOR_REPLACE_ONE: "a replaced example moves the count by at most 1, as an added one does",
}

CASES = (
    Case(
        "charged accuracy",
        f"an estimate: a Gaussian of multiplier {SIGMA:g}, add/remove",
        "one example moves the count by at most 1; Balle and Wang 2018; `jaxdp.finetune.charged_accuracy`",
        estimates(),
        TWINS,
    ),
)
