"""Time and memory of a clipped gradient over those of the plain gradient of the same model, in one run.

    python -m benchmarks.bench_clipping --models mlp,resnet20,vit --rounds 15 --output .bench/clipping.json

Steps are interleaved, each timed after an untimed call of its own, and reported as medians; ratios are medians of
per-round ratios to the plain step of the same round. "memory" is what XLA allocates for a step beyond its arguments
(temporaries and outputs). "cpu" is processor time of all threads, which a busy machine distorts less than wall time.
Peer: `jax_privacy.clipping.clipped_grad`.
"""

import argparse
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import models
from jaxdp.transforms import losses, noise

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], int]] = {
    "mlp": ("mlp", {"hidden": (512, 512)}, (28, 28, 1), 256),
    "resnet20": ("resnet20", {}, (32, 32, 3), 64),
    "vit": (
        "vit_tiny",
        {"patch_size": 4, "width": 192, "depth": 6, "num_heads": 3, "mlp_width": 768, "pool": "mean"},
        (32, 32, 3),
        32,
    ),
}


def steps_of(case: str, engines: list[str]) -> tuple[dict[str, Callable[..., Any]], tuple[Any, Any]]:
    name, options, shape, batch_size = CASES[case]
    model = models.create(name, num_classes=10, **options)
    images = jax.random.uniform(jax.random.key(0), (batch_size, *shape))
    labels = jnp.arange(batch_size) % 10
    params = model.init(jax.random.key(1), images[:1])["params"]

    def loss(params: Any, example: Any) -> jax.Array:
        image, label = example
        return losses.softmax_cross_entropy(model.apply({"params": params}, image[None])[0], label)

    def total(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).sum()

    steps: dict[str, Callable[..., Any]] = {"plain": jax.grad(total)}
    for engine in engines:
        if engine == "jax_privacy":
            from jax_privacy import clipping

            peer = clipping.clipped_grad(
                lambda p, x, y: loss(p, (x, y)), l2_clip_norm=1.0, batch_argnums=(1, 2), keep_batch_dim=False
            )
            steps[engine] = lambda p, b, peer=peer: peer(p, *b)
        else:
            own = jaxdp.clipped_grad(loss, clip_norm=1.0, engine=engine)
            steps[engine] = lambda p, b, own=own: own(p, b).grads
    key = noise.stream(bytes(range(16)), "benchmark")
    steps["noise"] = lambda p, b: noise.gaussian(key, p, 1.0)
    return steps, (params, (images, labels))


def check_equal(compiled: dict[str, Any], args: tuple[Any, Any]) -> None:
    """All clipped sums agree, or the timings mean nothing."""
    sums = {n: f(*args) for n, f in compiled.items() if n not in ("plain", "noise")}
    flat = {n: np.concatenate([np.ravel(x) for x in jax.tree.leaves(s)]) for n, s in sums.items()}
    first = next(iter(flat.values()))
    for name, values in flat.items():
        error = np.linalg.norm(values - first) / np.linalg.norm(first)
        if not error < 1e-4:
            raise AssertionError(f"{name} differs from the first engine by {error:.1e}")


def run_case(case: str, engines: list[str], rounds: int) -> dict[str, Any]:
    steps, args = steps_of(case, engines)
    compiled, rows = {}, {}
    for name, step in steps.items():
        start = time.perf_counter()
        compiled[name] = jax.jit(step).lower(*args).compile()
        seconds = time.perf_counter() - start
        memory = compiled[name].memory_analysis()
        allocated = memory.temp_size_in_bytes + memory.output_size_in_bytes
        rows[name] = {"compile_s": seconds, "memory_mb": allocated / 1e6}
    check_equal(compiled, args)
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in compiled.items():
            jax.block_until_ready(step(*args))  # the step before has emptied the caches
            start, start_cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(step(*args))
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - start_cpu)
    for name, row in rows.items():
        row["wall_ms"] = 1e3 * statistics.median(wall[name])
        row["cpu_ms"] = 1e3 * statistics.median(cpu[name])
        row["wall_ratio"] = statistics.median(a / b for a, b in zip(wall[name], wall["plain"], strict=True))
        row["cpu_ratio"] = statistics.median(a / b for a, b in zip(cpu[name], cpu["plain"], strict=True))
        row["memory_ratio"] = row["memory_mb"] / rows["plain"]["memory_mb"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,resnet20,vit", help=f"of {', '.join(CASES)}")
    parser.add_argument("--engines", default="auto,bookkeeping,vmap,jax_privacy")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", default=".bench/clipping.json")
    flags = parser.parse_args()
    device = jax.devices()[0]
    report: dict[str, Any] = {
        "device": device.device_kind,
        "platform": platform.platform(),
        "jax": jax.__version__,
        "jaxdp": jaxdp.__version__,
        "rounds": flags.rounds,
        "cases": {},
    }
    for case in flags.models.split(","):
        report["cases"][case] = rows = run_case(case, flags.engines.split(","), flags.rounds)
        table = [
            {"step": name, **{k: row[k] for k in ("wall_ms", "wall_ratio", "cpu_ratio", "memory_ratio", "compile_s")}}
            for name, row in rows.items()
        ]
        print(f"\n{case}, batch of {CASES[case][3]}\n{jaxdp.report.format_table(table, digits=3)}", flush=True)
    output = pathlib.Path(flags.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nWritten to {output}")


if __name__ == "__main__":
    main()
