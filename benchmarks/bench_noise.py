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
from benchmarks import problems, timing
from jaxdp import models
from jaxdp.report import format_table
from jaxdp.transforms import noise

SEED = bytes(16)
# name, options, batch size
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "resnet20": ("resnet20", {}, 64),
    "vit": (
        "vit_tiny",
        problems.VIT,
        32,
    ),
}


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
    table = {}
    for name in calls:
        table[name] = {
            "wall_ns_per_value": timing.median_ms(wall[name]) * 1e6 / size,
            "cpu_ns_per_value": timing.median_ms(cpu[name]) * 1e6 / size,
            "least_cpu_ns_per_value": min(cpu[name]) * 1e9 / size,
            f"cpu_over_{base}": timing.median_ratio(cpu[name], cpu[base]),
        }
    return table


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
    grad_fn = jaxdp.clipped_grad(problems.classifier_loss(model), clip_norm=1.0)
    gradient, _ = compiled(lambda params: grad_fn(params, (images, labels)).grads, params)
    grads = gradient()
    calls, compile_s = {"gradient": gradient}, {}

    def add_privatize(name: str, multiplier: float, compiler_options: Any) -> None:
        key = noise.stream(SEED, "noise")
        privatizer = noise.privatize(
            grad_fn, noise_multiplier=multiplier, divisor=batch_size, key=key
        )
        calls[name], compile_s[name] = compiled(
            lambda grads, state: privatizer.update(grads, state)[0],
            grads,
            privatizer.init(params),
            options=compiler_options,
        )

    def before(grads: Any, key: jax.Array) -> Any:
        return jax.tree.map(lambda x, z: (x + z) / batch_size, grads, old_noise(key, grads))

    add_privatize("privatize", 1.0, noise.CPU_OPTIONS)
    add_privatize("without noise", 0.0, None)
    old_key = jax.random.key(0, impl="rbg")
    calls["before"], compile_s["before"] = compiled(before, grads, old_key)
    wall, cpu = timing.interleaved(calls, rounds)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    per_value, share = {}, {}
    for part in ("privatize", "before"):
        steps = [a + b for a, b in zip(cpu["gradient"], cpu[part], strict=True)]
        per_value[part] = timing.median_ms(cpu[part]) * 1e6 / size
        share[part] = timing.median_ratio(cpu[part], steps)
    return {
        "parameters": size,
        "leaves": len(jax.tree.leaves(params)),
        "compile_cpu_s": compile_s,
        "cpu_ns_per_value": per_value,
        "cpu_share_of_step": share,
        "wall_ms": {part: timing.median_ms(seconds) for part, seconds in wall.items()},
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


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of a page."""
    generators = []
    for name, row in report["vector"].items():
        generators.append(
            {
                "a vector of 2^20 values": NAMES[name],
                "processor ns per value": f"{row['cpu_ns_per_value']:.1f}",
                "ns per value": f"{row['wall_ns_per_value']:.1f}",
                "processor time over jaxdp": f"{row['cpu_over_chacha12']:.2g}",
            }
        )
    share = {"noise of a model's gradient": "share of clipped gradient and noise (before)"}
    time_of_value = {"noise of a model's gradient": "processor ns per value (before)"}
    compiling = {"noise of a model's gradient": "seconds to compile `privatize` (before)"}
    for name, row in report["steps"].items():
        column = f"{name}, batch {MODELS[name][2]}"
        shares = {part: 100 * value for part, value in row["cpu_share_of_step"].items()}
        share[column] = _and_before(shares, " %")
        time_of_value[column] = _and_before(row["cpu_ns_per_value"])
        compiling[column] = _and_before(row["compile_cpu_s"])
    models_rows = [share, time_of_value, compiling]
    return {
        "noise": format_table(generators, style="markdown"),
        "noise of models": format_table(models_rows, style="markdown"),
    }


def _and_before(values: Mapping[str, float], unit: str = "") -> str:
    """Returns the value of `privatize`, and that of the design before in parentheses."""
    return f"{values['privatize']:.1f}{unit} ({values['before']:.1f}{unit})"


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
