"""A stage from outside the package: the mean of private numbers."""

import jax.numpy as jnp
import numpy as np

from jaxdp.privacy import PureDpEvent
from jaxdp.release import Release, Till, stream
from jaxdp.transforms import noise


def event(epsilon):
    """What a mean costs."""
    return PureDpEvent(epsilon)


def noisy_mean(values, *, epsilon, account, workdir=None, seed=None):
    """The mean of numbers in [0, 1] with Laplace noise; their number is public."""

    def compute(secret):
        scale = 1 / (epsilon * len(values))
        draw = noise.laplace(stream(secret, "mean"), jnp.float32(0), scale)
        return {"mean": np.mean(values) + draw}

    what = Release(
        label="noisy mean",
        charges=[(account, event(epsilon))],
        facts=lambda: [values, epsilon],
        compute=compute,
    )
    with Till(workdir, seed=seed) as till:
        return float(till.once(what)["mean"])
