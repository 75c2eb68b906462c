"""The short gate against slower steps: ratios of processor time to the plain gradient, with limits.

    python -m benchmarks.gate
    python -m benchmarks.gate vmap   # the broken twin: per-example gradients of the dense network, which must fail

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


def dense() -> tuple[Callable[..., Any], Any, Any]:
    """Returns the loss of one example of a network of dense layers, its parameters and a batch."""
    generator = np.random.default_rng(0)
    shapes = [(256, 256), (256, 256), (256, 10)]
    params = [jnp.asarray(generator.normal(size=s) / np.sqrt(s[0]), jnp.float32) for s in shapes]

    def loss(params: Any, example: Any) -> jax.Array:
        x, label = example
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return jaxdp.losses.softmax_cross_entropy(x @ params[-1], label)

    return (
        loss,
        params,
        (jnp.asarray(generator.normal(size=(128, 256)), jnp.float32), jnp.arange(128) % 10),
    )


def convolution() -> tuple[Callable[..., Any], Any, Any]:
    """Returns the same for two convolutions."""
    generator = np.random.default_rng(0)
    shapes = [(3, 3, 3, 16), (3, 3, 16, 16), (16, 10)]
    params = [jnp.asarray(generator.normal(size=s) * 0.1, jnp.float32) for s in shapes]

    def loss(params: Any, example: Any) -> jax.Array:
        x, label = example[0][None], example[1]
        for w in params[:2]:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(
                    x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return jaxdp.losses.softmax_cross_entropy(x.mean((0, 1, 2)) @ params[-1], label)

    return (
        loss,
        params,
        (jnp.asarray(generator.random((32, 16, 16, 3)), jnp.float32), jnp.arange(32) % 10),
    )


Step = Callable[[], Any]


def compiled(step: Callable[..., Any], *arguments: Any) -> Step:
    """Returns a compiled call of a function with these arguments."""
    return functools.partial(jax.jit(step).lower(*arguments).compile(), *arguments)


def calls(engine: Any = "auto") -> Iterator[tuple[str, Step, Step]]:
    """Yields the name of every ratio, its compiled step and the step that it is relative to."""
    key = noise.stream(bytes(range(16)), "gate")
    for name, make in (("dense", dense), ("convolution", convolution)):
        loss, params, batch = make()
        clipped = jaxdp.clipped_grad(loss, clip_norm=1.0, engine=engine)

        def mean(params: Any, batch: Any, loss: Any = loss) -> jax.Array:
            return jax.vmap(loss, in_axes=(None, 0))(params, batch).mean()

        def private(params: Any, batch: Any, clipped: Any = clipped) -> Any:
            grads = clipped(params, batch).grads
            return jax.tree.map(jnp.add, grads, noise.gaussian(key, grads, 1.0))

        steps = {"clipped": lambda p, b, f=clipped: f(p, b).grads, "private": private}
        plain = compiled(jax.grad(mean), params, batch)
        for kind, step in steps.items():
            if f"{name} {kind}" in LIMITS:
                yield f"{name} {kind}", compiled(step, params, batch), plain
    for name, size in (("noise", 2**18), ("noise of a small model", 26_010)):
        vector = jax.ShapeDtypeStruct((size,), jnp.float32)
        ours = compiled(lambda key, vector=vector: noise.gaussian(key, vector, 1.0), key)
        yield (
            name,
            ours,
            compiled(lambda key, size=size: jax.random.normal(key, (size,)), jax.random.key(0)),
        )


def failure(name: str, step: Step, base: Step) -> str | None:
    """Measures a ratio. Returns a sentence if it fails."""
    ratios: list[float] = []
    above = 0
    while len(ratios) < REPEATS and above < FAILURES and len(ratios) - above <= REPEATS - FAILURES:
        _, cpu = timing.interleaved({"step": step, "base": base}, ROUNDS)
        ratios.append(timing.median_ratio(cpu["step"], cpu["base"]))
        above += ratios[-1] > LIMITS[name]
    print(f"{name}: {sorted(round(r, 2) for r in ratios)}, limit {LIMITS[name]}", flush=True)
    if above < FAILURES:
        return None
    return (
        f"{name} takes {sorted(ratios)[len(ratios) // 2]:.2f} times its base, above {LIMITS[name]}."
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["vmap"]:
        sys.exit(failure(*next(calls("vmap"))))
    sys.exit("\n".join(filter(None, [failure(*call) for call in calls()])) or 0)
