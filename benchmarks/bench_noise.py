"""Times Gaussian noise beside other generators, and `privatize` as a share of a private step.

    python -m benchmarks run noise [--size 1048576] [--rounds 9]

The design before ChaCha is here as "rbg, two normals". `jaxdp.transforms.noise.CPU_OPTIONS` are
those of `fit`. NumPy and PyTorch draw on the host. Processor time counts all threads, so a value of
one core and of two cores are compared fairly."""

import argparse
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from benchmarks import timing
from jaxdp import models
from jaxdp.report import format_table
from jaxdp.transforms import losses, noise

SEED = bytes(16)
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "resnet20": ("resnet20", {}, 64),
    "vit": (
        "vit_tiny",
        {
            "patch_size": 4,
            "width": 192,
            "depth": 6,
            "num_heads": 3,
            "mlp_width": 768,
            "pool": "mean",
        },
        32,
    ),
}  # name, options, batch size


def old_noise(key: jax.Array, tree: Any) -> Any:
    """Sums two normals over sqrt(2), with a program for each leaf."""

    def leaf(index: int, like: jax.Array) -> jax.Array:
        first, second = (
            jax.random.normal(k, like.shape)
            for k in jax.random.split(jax.random.fold_in(key, index))
        )
        return (first + second) * math.sqrt(0.5)

    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [leaf(i, x) for i, x in enumerate(leaves)])


def compiled(
    function: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None
) -> tuple[Callable[[], Any], float]:
    """Returns a call and the processor seconds of its tracing and compilation."""
    start = time.process_time()
    program = jax.jit(function, compiler_options=options).lower(*args).compile()
    return lambda: program(*args), time.process_time() - start


def rows(calls: dict[str, Callable[[], Any]], size: int, rounds: int, base: str) -> dict[str, Any]:
    wall, cpu = timing.interleaved(calls, rounds)
    return {
        name: {
            "wall_ns_per_value": timing.median_ms(wall[name]) * 1e6 / size,
            "cpu_ns_per_value": timing.median_ms(cpu[name]) * 1e6 / size,
            "least_cpu_ns_per_value": min(cpu[name]) * 1e9 / size,
            f"cpu_over_{base}": timing.median_ratio(cpu[name], cpu[base]),
        }
        for name in calls
    }


def vector(size: int, rounds: int) -> dict[str, Any]:
    """Times one vector of float32."""
    like = jnp.zeros(size)
    keys = {impl: jax.random.key(0, impl=impl) for impl in ("rbg", "threefry2x32")}
    functions: dict[str, tuple[Callable[..., Any], Any]] = {
        "chacha12": (lambda key: noise.gaussian(key, like, 1.0), noise.stream(SEED, "noise")),
        "rbg, two normals": (lambda key: old_noise(key, like), keys["rbg"]),
        "rbg, one normal": (lambda key: jax.random.normal(key, like.shape), keys["rbg"]),
        "threefry2x32, one normal": (
            lambda key: jax.random.normal(key, like.shape),
            keys["threefry2x32"],
        ),
    }
    calls = {name: compiled(function, key)[0] for name, (function, key) in functions.items()}
    function, key = functions["chacha12"]
    calls["chacha12, CPU_OPTIONS"] = compiled(function, key, options=noise.CPU_OPTIONS)[0]
    generator = np.random.default_rng(0)
    calls["numpy"] = lambda: generator.standard_normal(size, np.float32)
    if not timing.missing("torch"):
        import torch

        calls["torch"] = lambda: torch.randn(size)
    return rows(calls, size, rounds, "chacha12")


def step(name: str, rounds: int) -> dict[str, Any]:
    """Times the noise of a model's gradient beside its clipped gradient."""
    model_name, options, batch_size = MODELS[name]
    model = models.create(model_name, num_classes=10, **options)
    images = jax.random.uniform(jax.random.key(0), (batch_size, 32, 32, 3))
    labels = jnp.arange(batch_size) % 10
    params = jax.jit(model.init)(jax.random.key(1), images[:1])["params"]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))

    def loss(params: Any, example: Any) -> jax.Array:
        return losses.softmax_cross_entropy(
            model.apply({"params": params}, example[0][None])[0], example[1]
        )

    grad_fn = jaxdp.clipped_grad(loss, clip_norm=1.0)

    def privatizer(multiplier: float, key: jax.Array) -> Any:
        return noise.privatize(grad_fn, noise_multiplier=multiplier, divisor=batch_size, key=key)

    def old(grads: Any, key: jax.Array) -> Any:
        return jax.tree.map(lambda x, z: (x + z) / batch_size, grads, old_noise(key, grads))

    gradient, _ = compiled(lambda params: grad_fn(params, (images, labels)).grads, params)
    grads, key = gradient(), noise.stream(SEED, "noise")
    noisy, quiet = privatizer(1.0, key), privatizer(0.0, key)
    private, compile_s = compiled(
        lambda grads, state: noisy.update(grads, state)[0],
        grads,
        noisy.init(params),
        options=noise.CPU_OPTIONS,
    )
    plain, plain_compile_s = compiled(
        lambda grads, state: quiet.update(grads, state)[0], grads, quiet.init(params)
    )
    before, old_compile_s = compiled(old, grads, jax.random.key(0, impl="rbg"))
    wall, cpu = timing.interleaved(
        {"gradient": gradient, "privatize": private, "without noise": plain, "before": before},
        rounds,
    )
    return {
        "parameters": size,
        "leaves": len(jax.tree.leaves(params)),
        "compile_cpu_s": {
            "privatize": compile_s,
            "without noise": plain_compile_s,
            "before": old_compile_s,
        },
        "cpu_ns_per_value": {
            part: timing.median_ms(cpu[part]) * 1e6 / size for part in ("privatize", "before")
        },
        "cpu_share_of_step": {
            part: timing.median_ratio(
                cpu[part], [a + b for a, b in zip(cpu["gradient"], cpu[part], strict=True)]
            )
            for part in ("privatize", "before")
        },
        "wall_ms": {part: timing.median_ms(wall[part]) for part in wall},
    }


NAMES = {
    "chacha12": "jaxdp, ChaCha12",
    "chacha12, CPU_OPTIONS": "jaxdp, ChaCha12 with `CPU_OPTIONS`, as in `fit`",
    "rbg, two normals": "before",
    "rbg, one normal": "`jax.random.normal`, rbg, one draw",
    "threefry2x32, one normal": "`jax.random.normal`, threefry2x32, one draw",
    "numpy": "NumPy, `standard_normal` in float32",
    "torch": "PyTorch, `randn`",
}


def tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of a page."""
    vector = [
        {
            "a vector of 2^20 values": NAMES[name],
            "processor ns per value": f"{row['cpu_ns_per_value']:.1f}",
            "ns per value": f"{row['wall_ns_per_value']:.1f}",
            "processor time over jaxdp": f"{row['cpu_over_chacha12']:.2g}",
        }
        for name, row in found["vector"].items()
    ]
    parts: dict[str, Callable[[Any, str], str]] = {
        "share of clipped gradient and noise (before)": lambda row, part: (
            f"{100 * row['cpu_share_of_step'][part]:.1f} %"
        ),
        "processor ns per value (before)": lambda row, part: f"{row['cpu_ns_per_value'][part]:.1f}",
        "seconds to compile `privatize` (before)": lambda row, part: (
            f"{row['compile_cpu_s'][part]:.1f}"
        ),
    }
    of_models = [
        {"noise of a model's gradient": title}
        | {
            f"{name}, batch {MODELS[name][2]}": f"{show(row, 'privatize')} ({show(row, 'before')})"
            for name, row in found["steps"].items()
        }
        for title, show in parts.items()
    ]
    return {
        name: format_table(rows, style="markdown")
        for name, rows in (("noise", vector), ("noise of models", of_models))
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=2**20, help="values of the vector")
    parser.add_argument("--rounds", type=int, default=9)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    report = {
        "vector": vector(flags.size, flags.rounds),
        "steps": {name: step(name, flags.rounds) for name in MODELS},
    }
    for part in (report["vector"], *report["steps"].values()):
        for name, row in part.items():
            print(name, row)
    return report
