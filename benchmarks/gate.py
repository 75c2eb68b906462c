"""The short gate against slower steps: ratios of processor time to the plain gradient, with limits.

    python -m benchmarks.gate
    python -m benchmarks.gate vmap   # the broken twin, which must fail

The twin has per-example gradients of the dense network.

Each ratio is measured five times. It fails if three of them are above its limit. Limits are about
half above what was measured when they were set, so that the noise of a busy machine passes and a
lost rule does not."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from benchmarks import timing
from jaxdp.transforms import noise

REPEATS, FAILURES, ROUNDS = 5, 3, 3
# Limits of the ratios. "private" is clipped gradient and noise, "noise" over one normal of
# Threefry.
LIMITS = {
    "dense clipped": 1.6,
    "dense private": 3.0,
    "convolution clipped": 2.2,
    "noise": 0.8,
    "noise of a small model": 1.4,
}


def dense() -> tuple[Callable, Any, Any]:
    """Returns the loss of one example of a network of dense layers, its parameters and a batch."""
    generator = np.random.default_rng(0)
    shapes = [(256, 256), (256, 256), (256, 10)]
    params = [jnp.asarray(generator.normal(size=s) / np.sqrt(s[0]), jnp.float32) for s in shapes]
    features = jnp.asarray(generator.normal(size=(128, 256)), jnp.float32)
    labels = jnp.arange(128) % 10

    def loss(params, example):
        x, label = example
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return jaxdp.losses.softmax_cross_entropy(x @ params[-1], label)

    return loss, params, (features, labels)


def convolution() -> tuple[Callable, Any, Any]:
    """Returns the same for two convolutions."""
    generator = np.random.default_rng(0)
    shapes = [(3, 3, 3, 16), (3, 3, 16, 16), (16, 10)]
    params = [jnp.asarray(generator.normal(size=s) * 0.1, jnp.float32) for s in shapes]
    images = jnp.asarray(generator.random((32, 16, 16, 3)), jnp.float32)
    labels = jnp.arange(32) % 10
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )

    def loss(params, example):
        image, label = example
        x = image[None]
        for kernel in params[:2]:
            x = jax.nn.relu(convolve(x, kernel))
        pooled = x.mean((0, 1, 2))
        return jaxdp.losses.softmax_cross_entropy(pooled @ params[-1], label)

    return loss, params, (images, labels)


def problems() -> dict[str, tuple[Callable, Any, Any]]:
    return {"dense": dense(), "convolution": convolution()}


Step = Callable[[], Any]


def calls(engine="auto") -> Iterator[tuple[str, Step, Step]]:
    """Yields the name of every ratio, its compiled step and the step that it is relative to."""
    for name, problem in problems().items():
        yield from _clipping_calls(name, problem, engine)
    yield _noise_call("noise", 2**18)
    yield _noise_call("noise of a small model", 26_010)


def _noise_key() -> jax.Array:
    return noise.stream(bytes(range(16)), "gate")


def _clipping_calls(
    name: str, problem: tuple[Callable, Any, Any], engine
) -> Iterator[tuple[str, Step, Step]]:
    loss, params, batch = problem
    clipped_grad = jaxdp.clipped_grad(loss, clip_norm=1.0, engine=engine)
    key = _noise_key()

    def mean(params, batch):
        return jax.vmap(loss, in_axes=(None, 0))(params, batch).mean()

    def clipped(params, batch):
        return clipped_grad(params, batch).grads

    def private(params, batch):
        grads = clipped(params, batch)
        return jax.tree.map(jnp.add, grads, noise.gaussian(key, grads, 1.0))

    plain = timing.compiled(jax.grad(mean), params, batch)
    for step in (clipped, private):
        ratio = f"{name} {step.__name__}"
        if ratio in LIMITS:
            yield ratio, timing.compiled(step, params, batch), plain


def _noise_call(name: str, size: int) -> tuple[str, Step, Step]:
    vector = jax.ShapeDtypeStruct((size,), jnp.float32)

    def ours(key):
        return noise.gaussian(key, vector, 1.0)

    def threefry(key):
        return jax.random.normal(key, (size,))

    base = timing.compiled(threefry, jax.random.key(0))
    return name, timing.compiled(ours, _noise_key()), base


def failure(name: str, step: Step, base: Step, rounds: int = ROUNDS) -> str | None:
    """Measures a ratio. Returns a sentence if it fails."""
    limit = LIMITS[name]
    ratios = []
    above = below = 0
    # A verdict that the remaining repeats cannot change ends the measurement.
    while above < FAILURES and below <= REPEATS - FAILURES:
        _, cpu = timing.interleaved({"step": step, "base": base}, rounds)
        ratio = timing.median_ratio(cpu["step"], cpu["base"])
        ratios.append(ratio)
        if ratio > limit:
            above += 1
        else:
            below += 1
    ratios.sort()
    print(f"{name}: {[round(ratio, 2) for ratio in ratios]}, limit {limit}", flush=True)
    if above < FAILURES:
        return None
    return f"{name} takes {ratios[len(ratios) // 2]:.2f} times its base, above {limit}."


if __name__ == "__main__":
    if sys.argv[1:] == ["vmap"]:
        # A step of the twin takes seventy times its base.
        sys.exit(failure(*next(calls("vmap")), rounds=1))
    failures = [failure(*call) for call in calls()]
    sys.exit("\n".join(filter(None, failures)) or 0)
