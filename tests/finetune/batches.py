"""States whose first batches have what a test needs, whatever the generators draw from a key."""

import jax.numpy as jnp

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
