"""A small model with two LayerNorms, as a JAX function and as the NumPy oracle's model, and images
for it."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.tta import reference_tta as published

CLASSES, WIDTH, SIDE = 4, 6, 4


_rng = np.random.default_rng(0)
PARAMS = {
    "embed": jnp.asarray(_rng.normal(size=(SIDE * SIDE * 3, WIDTH)) / 7, jnp.float32),
    "block_0": {
        "norm": {
            "scale": jnp.asarray(_rng.uniform(0.7, 1.3, WIDTH), jnp.float32),
            "bias": jnp.asarray(_rng.normal(size=WIDTH) / 5, jnp.float32),
        }
    },
    "block_1": {
        "norm": {
            "scale": jnp.asarray(_rng.uniform(0.7, 1.3, WIDTH), jnp.float32),
            "bias": jnp.asarray(_rng.normal(size=WIDTH) / 5, jnp.float32),
        }
    },
    "head": jnp.asarray(_rng.normal(size=(WIDTH, CLASSES)) * 0.7, jnp.float32),
}
MODEL = published.Model(
    np.asarray(PARAMS["embed"], np.float64), np.asarray(PARAMS["head"], np.float64)
)


CALLS = []  # one for each call of `apply_fn`: a compiled step calls it while it is traced only


def apply_fn(params, images):
    """Returns logits [B, C] of images [B, SIDE, SIDE, 3]."""
    CALLS.append(images.shape)
    h = images.reshape(len(images), -1).astype(params["embed"].dtype) @ params["embed"]
    for name in ("block_0", "block_1"):
        h = _layer_norm(h, params[name]["norm"])
        h = jnp.tanh(h) if name == "block_0" else h
    return h @ params["head"]


def _layer_norm(h, affine):
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        h.var(-1, keepdims=True) + published.EPSILON
    )
    return h * affine["scale"][None] + affine["bias"][None]


def theta_of(params):
    """Returns the oracle's array [4, WIDTH] of the adapted parameters."""
    norms = [
        params[name]["norm"][kind] for name in ("block_0", "block_1") for kind in ("scale", "bias")
    ]
    return np.stack([np.asarray(x, np.float64) for x in norms])


THETA = theta_of(PARAMS)


def stream(seed, steps=6, size=6):
    """Images [steps, size, SIDE, SIDE, 3]."""
    return np.random.default_rng(seed).normal(size=(steps, size, SIDE, SIDE, 3)).astype(np.float32)


def run(adapter, batches, *, state=None, key=None, masks=None):
    """Returns (states after each step, logits of each step)."""
    state = adapter.init(jax.random.key(1)) if state is None else state
    states, logits = [], []
    for t, batch in enumerate(batches):
        state, z = adapter.step(state, batch, key, None if masks is None else masks[t])
        states.append(state)
        logits.append(np.asarray(z))
    return states, logits


def upside_down(key, image):
    """A second view for DeYO."""
    return image[::-1]
