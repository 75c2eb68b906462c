"""The short gate against slower steps: ratios of processor time to the plain gradient, with limits.

    python -m benchmarks.gate

Each ratio is measured five times. It fails if three of them are above its limit. Limits are about half above what was
measured when they were set, so that the noise of a busy machine passes and a lost rule does not.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from benchmarks import timing
from jaxdp.transforms import noise

REPEATS, FAILURES, ROUNDS = 5, 3, 5
# Limits of the ratios. "private" is clipped gradient and noise, "noise" over one normal of Threefry.
LIMITS = {"dense clipped": 1.6, "dense private": 3.5, "convolution clipped": 2.2, "noise": 3.0}


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

    return loss, params, (jnp.asarray(generator.normal(size=(256, 256)), jnp.float32), jnp.arange(256) % 10)


def convolution() -> tuple[Callable[..., Any], Any, Any]:
    """Returns the same for two convolutions."""
    generator = np.random.default_rng(0)
    shapes = [(3, 3, 3, 16), (3, 3, 16, 16), (16, 10)]
    params = [jnp.asarray(generator.normal(size=s) * 0.1, jnp.float32) for s in shapes]

    def loss(params: Any, example: Any) -> jax.Array:
        x, label = example[0][None], example[1]
        for w in params[:2]:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return jaxdp.losses.softmax_cross_entropy(x.mean((0, 1, 2)) @ params[-1], label)

    return loss, params, (jnp.asarray(generator.random((32, 16, 16, 3)), jnp.float32), jnp.arange(32) % 10)


def calls(engine: Any = "auto") -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Returns the compiled step and its base of every ratio."""
    found: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    key, vector = noise.stream(bytes(range(16)), "gate"), jax.ShapeDtypeStruct((2**18,), jnp.float32)
    for name, make in (("dense", dense), ("convolution", convolution)):
        loss, params, batch = make()
        clipped = jaxdp.clipped_grad(loss, clip_norm=1.0, engine=engine)

        def mean(params: Any, batch: Any, loss: Any = loss) -> jax.Array:
            return jax.vmap(loss, in_axes=(None, 0))(params, batch).mean()

        def private(params: Any, batch: Any, clipped: Any = clipped) -> Any:
            grads = clipped(params, batch).grads
            return jax.tree.map(jnp.add, grads, noise.gaussian(key, grads, 1.0))

        plain = jax.jit(jax.grad(mean)).lower(params, batch).compile()
        steps = {"clipped": jax.jit(lambda p, b, clipped=clipped: clipped(p, b).grads), "private": jax.jit(private)}
        for kind, step in steps.items():
            if f"{name} {kind}" in LIMITS:
                compiled = step.lower(params, batch).compile()
                found[f"{name} {kind}"] = (
                    lambda compiled=compiled, params=params, batch=batch: compiled(params, batch),
                    lambda plain=plain, params=params, batch=batch: plain(params, batch),
                )
    ours = jax.jit(lambda key: noise.gaussian(key, vector, 1.0))
    theirs, their_key = jax.jit(lambda key: jax.random.normal(key, vector.shape)), jax.random.key(0)
    found["noise"] = (lambda: ours(key), lambda: theirs(their_key))
    return found


def failures(steps: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], rounds: int = ROUNDS) -> list[str]:
    """Measures all ratios and returns a sentence for each that fails."""
    found = []
    for name, (step, base) in steps.items():
        ratios = []
        for _ in range(REPEATS):
            _, cpu = timing.interleaved({"step": step, "base": base}, rounds)
            ratios.append(timing.median_ratio(cpu["step"], cpu["base"]))
        print(f"{name}: {sorted(round(r, 2) for r in ratios)}, limit {LIMITS[name]}", flush=True)
        if sum(ratio > LIMITS[name] for ratio in ratios) >= FAILURES:
            found.append(f"{name} takes {sorted(ratios)[REPEATS // 2]:.2f} times its base, above {LIMITS[name]}.")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(failures(calls())))
