"""Times a clipped gradient against the plain gradient of the same model, and its memory.

    python -m benchmarks run clipping --models mlp,cnn,resnet20,vit --rounds 15

Steps are interleaved. Each is timed after an untimed call of it, and medians are reported. Ratios
are medians of the ratios to the plain step of the same round. "memory" is what XLA allocates for a
step beyond its arguments (temporaries and outputs). "trace" includes the lowering to StableHLO, and
"compile" includes "trace". "cpu" is processor time of all threads, which a busy machine distorts
less than wall time. The peer is `jax_privacy.clipping.clipped_grad`."""

import re
from collections.abc import Callable

import jax
import numpy as np

import jaxdp
from benchmarks import bench_steps, problems, timing
from jaxdp.memory import keep_freed_memory
from jaxdp.transforms import noise

CASES = ("mlp", "cnn", "resnet20", "vit")  # of `problems.cases`
_PRODUCT = re.compile(
    r" (?:dot|convolution)\(|custom_call_target=\"\w*(?:matmul|conv|dot)", re.IGNORECASE
)
TITLES = {case: title for case, (title, *_) in bench_steps.AIMS.items()}


def steps_of(case: str, engines: list[str]) -> tuple[dict[str, Callable], tuple]:
    problem = problems.cases()[case]
    params, loss, losses = problems.image_problem(problem)
    batch = problem.images(problem.batch_size)
    steps = {"plain": jax.grad(lambda params, batch: losses(params, batch).sum())}
    for engine in engines:
        if engine == "jax_privacy":
            peer = problems.jax_privacy_grad(lambda p, x, y: loss(p, (x, y)), 1.0, (1, 2))
            steps[engine] = lambda p, b, peer=peer: peer(p, *b)
        else:
            own = jaxdp.clipped_grad(loss, clip_norm=1.0, engine=engine)
            steps[engine] = lambda p, b, own=own: own(p, b).grads
    key = noise.stream(bytes(range(16)), "benchmark")
    steps["noise"] = lambda p, b: noise.gaussian(key, p, 1.0)
    return steps, (params, batch)


def check_equal(calls: dict):
    """Checks that all clipped sums agree."""
    sums = {n: call() for n, call in calls.items() if n not in ("plain", "noise")}
    flat = {n: np.concatenate([np.ravel(x) for x in jax.tree.leaves(s)]) for n, s in sums.items()}
    first = next(iter(flat.values()))
    for name, values in flat.items():
        error = np.linalg.norm(values - first) / np.linalg.norm(first)
        if not error < 1e-4:
            raise AssertionError(f"{name} differs from the first engine by {error:.1e}.")


def run_case(case: str, engines: list[str], rounds: int) -> dict:
    steps, args = steps_of(case, engines)
    calls, rows = {}, {}
    for name, step in steps.items():
        calls[name] = call = timing.compiled(step, *args)
        text = call.program.as_text()
        row = {"trace_s": call.trace_s, "compile_s": call.compile_s, "memory_mb": call.memory_mb}
        row |= {"fusions": text.count(" fusion("), "products": len(_PRODUCT.findall(text))}
        rows[name] = row
    check_equal(calls)
    wall, cpu = timing.interleaved(calls, rounds)
    for name, row in rows.items():
        row["wall_ms"], row["cpu_ms"] = timing.median_ms(wall[name]), timing.median_ms(cpu[name])
        row["wall_ratio"] = timing.median_ratio(wall[name], wall["plain"])
        row["cpu_ratio"] = timing.median_ratio(cpu[name], cpu["plain"])
        row["memory_ratio"] = row["memory_mb"] / rows["plain"]["memory_mb"]
    return rows


def tables(report, sequential) -> dict:
    """Returns the tables of docs/results/speed.md: ratios to the plain gradient without and with
    XLA's flag, megabytes of both, and what there is to compile."""
    memory, compiling = [], []
    for case, row in report["cases"].items():
        megabytes = {"MB": TITLES[case]}
        for title, run in (("", row), (", in sequence", sequential["cases"][case])):
            for step in ("plain", "auto"):
                megabytes[f"{step}{title}"] = f"{run[step]['memory_mb']:.3g}"
        memory.append(megabytes)
        values = {"": TITLES[case]}
        for step in ("plain", "auto"):
            one = row[step]
            values[f"{step}: trace, s"] = f"{one['trace_s']:.2f}"
            values[f"{step}: compile, s"] = f"{one['compile_s'] - one['trace_s']:.2f}"
            values[f"{step}: fusions, products"] = f"{one['fusions']}, {one['products']}"
        compiling.append(values)
    return {
        "clipping": _ratios(report),
        "clipping in sequence": _ratios(sequential),
        "clipping memory": memory,
        "clipping compile": compiling,
    }


RATIOS = {
    "time": "wall_ratio",
    "processor time": "cpu_ratio",
    "memory": "memory_ratio",
    "compiling": "compile_ratio",
}


def _ratios(report) -> list[dict[str, str]]:
    lines = []
    for case, rows in report["cases"].items():
        engines = {name: row for name, row in rows.items() if name not in ("plain", "noise")}
        for row in engines.values():
            row["compile_ratio"] = row["compile_s"] / rows["plain"]["compile_s"]
        for title, ratio in RATIOS.items():
            line = {"over the plain gradient": f"{TITLES[case]}: {title}"}
            lines.append(line | {name: f"{row[ratio]:.3g}" for name, row in engines.items()})
    return lines


FLAGS = {
    "models": (",".join(CASES), f"of {', '.join(CASES)}"),
    "engines": "auto,bookkeeping,vmap,jax_privacy",
    "rounds": 15,
}


def measure(flags) -> dict:
    keep_freed_memory()
    engines = flags.engines.split(",")

    def rows_of(case):
        return run_case(case, engines, flags.rounds)

    cases = timing.each(flags.models.split(","), rows_of)
    return {"rounds": flags.rounds, "cases": cases}
