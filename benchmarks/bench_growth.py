"""Measures how time and memory of private training grow with batch, parameters, devices, steps and
ledger rows.

    python -m benchmarks run growth --update
    python -m benchmarks.evidence design/scale.md

Every point is a process of its own, because memory that one point used would count for the next.
Time is processor time, the median of the rounds, because other programs may use the machine. "rss"
is the most memory that the process held. "held" is what XLA allocates for the arguments, results
and temporary arrays of the largest program. The second command draws the picture."""

import functools
import itertools
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import bench_scale, problems, timing
from jaxdp import finetune
from jaxdp.compilers import hlo
from jaxdp.data import PoissonSampler, from_arrays
from jaxdp.privacy import GaussianDpEvent, Ledger, PoissonSampledDpEvent

ROUNDS = 11
POINTS = {
    "batch": (64, 128, 256, 512, 1024, 2048),
    "parameters": (128, 256, 512, 1024, 2048),  # units in each of two hidden layers
    "devices": (1, 2, 4, 8),
    "steps": (50, 200, 800, 3200),
    "ledger rows": (100, 300, 1000, 3000, 10000),
}
FEATURES, CLASSES, UNITS, BATCH = 256, 10, 512, 512
FLAGS = {
    "point": {"nargs": 2, "help": "an axis and a value: measure this point here"},
}


def timed(call: Callable, rounds: int = ROUNDS) -> dict[str, float]:
    """Returns processor and wall seconds of a call, the medians of the rounds."""
    wall, cpu = timing.interleaved({"call": call}, rounds, warm=False)
    return {"cpu_s": statistics.median(cpu["call"]), "wall_s": statistics.median(wall["call"])}


def training(units: int, batch: int, devices: int) -> tuple:
    """Returns a trainer of a multilayer perceptron, its first parameters, its source, and its loss
    of a batch."""
    rng = np.random.default_rng(0)
    params = []
    for pair in itertools.pairwise((FEATURES, units, units, CLASSES)):
        params.append(jnp.asarray(rng.normal(size=pair) / np.sqrt(pair[0]), jnp.float32))
    records = 8192
    source = from_arrays(
        x=rng.normal(size=(records, FEATURES)).astype(np.float32),
        y=rng.integers(CLASSES, size=records),
    )

    def mean_loss(params, batch):
        h = jnp.tanh(jnp.tanh(batch["x"] @ params[0]) @ params[1]) @ params[2]
        return optax.softmax_cross_entropy_with_integer_labels(h, batch["y"]).mean()

    trainer = finetune.dp_sgd(
        lambda params, example: mean_loss(params, jax.tree.map(lambda x: x[None], example)),
        optax.sgd(0.1, momentum=0.9),
        clip_norm=1.0,
        noise_multiplier=1.0,
        sampler=PoissonSampler(records, batch / records),
        physical_batch_size=batch,
        mesh=bench_scale.mesh_of(devices) if devices > 1 else None,
        param_sharding=bench_scale.divided(devices) if devices > 1 else None,
    )
    return trainer, params, source, mean_loss


def step_point(units: int = UNITS, batch: int = BATCH, devices: int = 1) -> dict[str, float]:
    """Measures a step on one physical batch of `batch` examples, and the plain step."""
    trainer, params, source, mean_loss = training(units, batch, devices)
    state, rows = trainer.init(params), np.arange(batch)
    calls = trainer.programs(state, source).values()
    programs = [function.lower(*args).compile() for function, args in calls]

    def private():
        jax.block_until_ready(trainer.update(state, trainer.sums(state, source, rows)))

    private()
    row = timed(private)
    counts = [hlo.count(program) for program in programs]
    row |= {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "flops": sum(count.flops for count in counts),
        "sent_bytes": sum(count.moved for count in counts),
        "held_mb": max(map(timing.held_bytes, programs)) / 1e6,
    }
    if devices == 1:
        optimizer = trainer.optimizer

        @jax.jit
        def updated(params, opt_state, batch):
            grads = jax.grad(mean_loss)(params, batch)
            return problems.updated(optimizer, grads, opt_state, params)

        opt_state = optimizer.init(params)

        def plain():
            return updated(params, opt_state, jax.device_put(source.gather(rows)))

        jax.block_until_ready(plain())
        row["plain_cpu_s"] = timed(plain)["cpu_s"]
    return row


def steps_point(steps: int) -> dict[str, float]:
    """Measures a whole run of `steps` steps with a ledger and checkpoints, without its first
    step."""
    trainer, params, source, _ = training(128, 128, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with Ledger(folder / "ledger.sqlite") as ledger:
            ledger.register("data", adjacency="add_remove", unit="example", delta=1e-6)
            options = {"account": ledger.account("data"), "progress": False}
            run = functools.partial(
                finetune.fit, trainer, params, source, checkpoint_every=50, **options
            )
            run(steps=1, workdir=folder / "first")
            return timed(lambda: run(steps=steps, workdir=folder / "run").params, rounds=1)


def ledger_point(rows: int) -> dict[str, float]:
    """Measures opening a ledger of `rows` spends, a question about epsilon, and one more spend."""
    event = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "ledger.sqlite"
        with Ledger(path) as ledger:
            ledger.register("data", adjacency="add_remove", unit="example", delta=1e-6)
            for _ in range(rows):
                with ledger.spend("data", event):
                    pass

        def one_more():
            with Ledger(path) as ledger:
                ledger.epsilon("data")
                with ledger.spend("data", event):
                    pass

        one_more()
        return timed(one_more) | {"file_mb": path.stat().st_size / 1e6}


MEASURES = {
    "batch": lambda value: step_point(batch=value),
    "parameters": lambda value: step_point(units=value),
    "devices": lambda value: step_point(devices=value),
    "steps": steps_point,
    "ledger rows": ledger_point,
}


def measured(axis: str, value: int) -> dict[str, float]:
    """Measures a point in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "run", "growth", "--point", axis, str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def tables(report) -> dict:
    """Returns no tables. The page has a picture."""
    return {}


def draw(report: dict, path: pathlib.Path):
    """Draws time and memory of each axis, and work and bytes of a device."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(17, 6.4), layout="constrained")
    for column, (axis, (xlabel, title)) in enumerate(AXES.items()):
        points = report["axes"][axis]
        key = "parameters" if axis == "parameters" else "value"
        x = [point[key] for point in points]
        work = [("flops", "MFLOP of one device", 1e-6)] if axis == "devices" else []
        for row, (heading, lines) in enumerate(((title, TIMES + work), ("MB", MEMORIES))):
            axes = figure.add_subplot(2, len(AXES), 1 + column + row * len(AXES))
            for name, label, scale in lines:
                if all(name in point for point in points):
                    values = [point[name] * scale for point in points]
                    axes.plot(x, values, marker="o", markersize=4, label=label)
            axes.set_title(heading)
            axes.set_xscale("log")
            names = [f"{value:,}" if value < 1e5 else f"{value / 1e6:.1f} M" for value in x]
            axes.set_xticks(x, names)
            axes.minorticks_off()
            values = [value for drawn in axes.lines for value in drawn.get_ydata()]
            if max(values) > 5 * min(values):
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_minor_locator(NullLocator())
            else:
                axes.set_ylim(0, 1.3 * max(values))
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        axes.set_xlabel(xlabel)
    figure.suptitle("Processor time and memory, medians of processes of their own")
    figure.savefig(path, dpi=90)


# The label of x, and the title of the times.
AXES = {
    "batch": ("examples in a physical batch", "ms of a step"),
    "parameters": ("parameters", "ms of a step"),
    "devices": ("virtual devices on two cores", "ms of a step"),
    "steps": ("steps of a run, a checkpoint every 50", "ms of a run"),
    "ledger rows": ("rows of the ledger", "ms to open, ask and spend"),
}
TIMES = [("cpu_s", "private", 1e3), ("plain_cpu_s", "plain", 1e3)]
MEMORIES = [
    ("rss_mb", "resident memory of the process", 1),
    ("held_mb", "of XLA, for one device", 1),
    ("file_mb", "file of the ledger", 1),
]


def measure(flags) -> dict | None:
    if flags.point:
        axis, value = flags.point[0], int(flags.point[1])
        if axis == "devices":
            bench_scale.pretend(value)
        point = MEASURES[axis](value)
        # Linux counts in units of 1024 bytes.
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(point | {"rss_mb": held / 1e6}))
        return None
    axes = {}
    for axis, values in POINTS.items():
        axes[axis] = [{"value": value} | measured(axis, value) for value in values]
    return {"rounds": ROUNDS, "axes": axes}
