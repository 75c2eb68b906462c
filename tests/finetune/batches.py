"""States whose first batches have what a test needs, whatever the generators draw from a key, and
the standard deviation of noise."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.transforms import noise


def with_batches(trainer, state, steps, suits):
    """Returns `state` with the first keys for which `suits` accepts the lists of indices of the
    first batches."""
    for number in range(1000):
        key = noise.stream(bytes([number % 256, number // 256] * 8), "test")
        found = state._replace(noise=state.noise._replace(key=key))
        if suits([trainer.drawn(found._replace(step=jnp.int32(t))) for t in range(steps)]):
            return found
    raise AssertionError("no such state")


def of_many_parts_or_none(probability, physical):
    """Returns whether batches have an empty one, or with a large probability more than two physical
    batches."""

    def suits(batches):
        sizes = list(map(len, batches))
        return max(sizes) > 2 * physical if probability > 0.1 else min(sizes) == 0

    return suits


def flat(tree):
    """Returns all values of a tree in float64."""
    return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(tree)])


def has_std(sample, std):
    """Whether a sample may have this standard deviation; a right one fails with probability below
    1e-6."""
    return abs((sample**2).mean() / std**2 - 1) < 4.9 * math.sqrt(2 / sample.size)
