r"""Times a clipped gradient against the plain gradient of the same model, and its memory.

    python -m benchmarks run clipping --models mlp,cnn,resnet20,vit --rounds 15 \
        --output .bench/clipping.json

Steps are interleaved. Each is timed after an untimed call of it, and medians are reported. Ratios
are medians of the ratios to the plain step of the same round. "memory" is what XLA allocates for a
step beyond its arguments (temporaries and outputs). "trace" includes the lowering to StableHLO, and
"compile" includes "trace". "cpu" is processor time of all threads, which a busy machine distorts
less than wall time. The peer is `jax_privacy.clipping.clipped_grad`."""

import argparse
import functools
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import bench_steps, problems, timing
from jaxdp import models
from jaxdp.memory import keep_freed_memory
from jaxdp.report import format_table
from jaxdp.transforms import noise

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], int]] = {
    "mlp": ("mlp", {"hidden": (512, 512)}, (28, 28, 1), 256),
    "cnn": ("cnn", {}, (28, 28, 1), 256),  # that of the MNIST examples
    "resnet20": ("resnet20", {}, (32, 32, 3), 64),
    "vit": (
        "vit_tiny",
        problems.VIT,
        (32, 32, 3),
        32,
    ),
}

_PRODUCT = re.compile(
    r" (?:dot|convolution)\(|custom_call_target=\"\w*(?:matmul|conv|dot)", re.IGNORECASE
)
TITLES = {case: title for case, (title, *_) in bench_steps.AIMS.items()}


def steps_of(
    case: str, engines: list[str]
) -> tuple[dict[str, Callable[..., Any]], tuple[Any, Any]]:
    name, options, shape, batch_size = CASES[case]
    model = (
        bench_steps.Digits() if case == "cnn" else models.create(name, num_classes=10, **options)
    )
    images = jax.random.uniform(jax.random.key(0), (batch_size, *shape))
    labels = jnp.arange(batch_size) % 10
    params = model.init(jax.random.key(1), images[:1])["params"]

    loss = problems.classifier_loss(model)

    def total(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).sum()

    steps: dict[str, Callable[..., Any]] = {"plain": jax.grad(total)}
    for engine in engines:
        if engine == "jax_privacy":
            peer = problems.jax_privacy_grad(lambda p, x, y: loss(p, (x, y)), 1.0, (1, 2))
            steps[engine] = lambda p, b, peer=peer: peer(p, *b)
        else:
            own = jaxdp.clipped_grad(loss, clip_norm=1.0, engine=engine)
            steps[engine] = lambda p, b, own=own: own(p, b).grads
    key = noise.stream(bytes(range(16)), "benchmark")
    steps["noise"] = lambda p, b: noise.gaussian(key, p, 1.0)
    return steps, (params, (images, labels))


def check_equal(compiled: dict[str, Any], args: tuple[Any, Any]) -> None:
    """Checks that all clipped sums agree."""
    sums = {n: f(*args) for n, f in compiled.items() if n not in ("plain", "noise")}
    flat = {n: np.concatenate([np.ravel(x) for x in jax.tree.leaves(s)]) for n, s in sums.items()}
    first = next(iter(flat.values()))
    for name, values in flat.items():
        error = np.linalg.norm(values - first) / np.linalg.norm(first)
        if not error < 1e-4:
            raise AssertionError(f"{name} differs from the first engine by {error:.1e}.")


def run_case(case: str, engines: list[str], rounds: int) -> dict[str, Any]:
    steps, args = steps_of(case, engines)
    compiled, rows = {}, {}
    for name, step in steps.items():
        start = time.perf_counter()
        lowered = jax.jit(step).lower(*args)
        traced = time.perf_counter() - start
        compiled[name] = lowered.compile()
        seconds, text = time.perf_counter() - start, compiled[name].as_text()
        rows[name] = {
            "trace_s": traced,
            "compile_s": seconds,
            "memory_mb": timing.allocated_mb(compiled[name]),
        }
        rows[name] |= {"fusions": text.count(" fusion("), "products": len(_PRODUCT.findall(text))}
    check_equal(compiled, args)
    wall, cpu = timing.interleaved(
        {name: functools.partial(step, *args) for name, step in compiled.items()}, rounds
    )
    for name, row in rows.items():
        row["wall_ms"], row["cpu_ms"] = timing.median_ms(wall[name]), timing.median_ms(cpu[name])
        row["wall_ratio"] = timing.median_ratio(wall[name], wall["plain"])
        row["cpu_ratio"] = timing.median_ratio(cpu[name], cpu["plain"])
        row["memory_ratio"] = row["memory_mb"] / rows["plain"]["memory_mb"]
    return rows


def table(report: Mapping[str, Any]) -> str:
    """Returns the ratios to the plain gradient as a table of a page."""
    rows = []
    for case, row in report["cases"].items():
        for name, key in (
            ("time", "wall_ratio"),
            ("processor time", "cpu_ratio"),
            ("memory", "memory_ratio"),
        ):
            ratios = {
                engine: f"{row[engine][key]:.3g}"
                for engine in row
                if engine not in ("plain", "noise")
            }
            rows.append({"over the plain gradient": f"{TITLES[case]}: {name}", **ratios})
        compiling = {
            engine: row[engine]["compile_s"] / row["plain"]["compile_s"] for engine in ratios
        }
        rows.append(
            {"over the plain gradient": f"{TITLES[case]}: compiling"}
            | {k: f"{v:.3g}" for k, v in compiling.items()}
        )
    return format_table(rows, style="markdown")


def compile_table(report: Mapping[str, Any]) -> str:
    """Returns what there is to compile for the plain gradient and for the engine "auto", as a table
    of a page."""
    rows = []
    for case, row in report["cases"].items():
        values: dict[str, str] = {}
        for step in ("plain", "auto"):
            one = row[step]
            values[f"{step}: trace, s"] = f"{one['trace_s']:.2f}"
            values[f"{step}: compile, s"] = f"{one['compile_s'] - one['trace_s']:.2f}"
            values[f"{step}: fusions, products"] = f"{one['fusions']}, {one['products']}"
        rows.append({"": TITLES[case], **values})
    return format_table(rows, style="markdown")


def memory_table(report: Mapping[str, Any], sequential: Mapping[str, Any]) -> str:
    """Returns the megabytes of the gradients without and with XLA's flag as a table of a page."""
    rows = []
    for case, row in report["cases"].items():
        both = {"": row, ", in sequence": sequential["cases"][case]}
        values = {
            f"{step}{title}": f"{run[step]['memory_mb']:.3g}"
            for title, run in both.items()
            for step in ("plain", "auto")
        }
        rows.append({"MB": TITLES[case], **values})
    return format_table(rows, style="markdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--engines", default="auto,bookkeeping,vmap,jax_privacy")
    parser.add_argument("--rounds", type=int, default=15)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()
    columns = ("wall_ms", "wall_ratio", "cpu_ratio", "memory_ratio", "compile_s")
    cases = {}
    for case in flags.models.split(","):
        cases[case] = run_case(case, flags.engines.split(","), flags.rounds)
        timing.show(f"{case}, batch of {CASES[case][3]}", cases[case], columns)
    return {"rounds": flags.rounds, "cases": cases}
