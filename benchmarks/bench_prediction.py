"""Times certifying 20 distances against one training run with per-record clipped gradients, and the
memory.

    python -m benchmarks run prediction --rounds 7

Two baselines train the same model with the same clipped gradients. "vmap" is the obvious program:
`jax.vmap(jax.grad(loss))`, clip, sum. "streamed" adds up one record after the other in a scan,
which XLA vectorises over parameters. It is the fastest that we know. "bounds" is
`train_with_bounds` with ks = 0..20, and "one k" the same with a single distance. Rounds are
interleaved, and medians are reported. Ratios are medians of ratios within a round. "memory" is what
XLA allocates beyond the arguments. "first call" includes compiling."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import timing
from jaxdp.memory import keep_freed_memory
from jaxdp.prediction import agt, checks, plan, train_with_bounds
from jaxdp.transforms import losses


class Case(NamedTuple):
    sizes: tuple[int, ...]  # of a multilayer perceptron with ReLU
    records: int
    steps: int
    clip: float
    learning_rate: float
    lr_decay: float
    images: bool = False  # two frozen convolutions make the features


CASES = {
    "mlp 784-128-10, 1 step": Case((784, 128, 10), 1000, 1, 0.1, 0.1, 0.0),
    "embeddings 768-100-1, 1 step": Case((768, 100, 1), 1000, 1, 0.04, 0.2, 0.5),
    "embeddings 768-100-1, 3 steps": Case((768, 100, 1), 1000, 3, 0.04, 0.2, 0.5),
    "frozen conv, 3200-100-1, 1 step": Case((3200, 100, 1), 1000, 1, 0.9, 0.06, 0.5, images=True),
    "blobs 6-2, 1 step": Case((6, 2), 5000, 1, 0.06, 2.0, 0.6),
    "blobs 6-128-2, 4 steps": Case((6, 128, 2), 3000, 4, 0.06, 2.0, 0.6),
}
KS = 20


def network(params, x: jax.Array) -> jax.Array:
    for stride, kernel in zip((2, 1), params.get("frozen", ()), strict=False):
        x = lax.conv_general_dilated(
            x[None], kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x[0])
    x = x.reshape(-1)
    for i, (weight, bias) in enumerate(params["dense"]):
        x = x @ weight + bias if i == 0 else jax.nn.relu(x) @ weight + bias
    return x


def loss(params, example) -> jax.Array:
    return loss_of(network(params, example["x"]), example["y"])


def loss_of(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Returns the loss of one logit, or of a logit for each class."""
    if logits.size == 1:
        return losses.sigmoid_cross_entropy(logits, label)
    return losses.softmax_cross_entropy(logits, label)


def trained(path: str, leaf) -> bool:
    del leaf
    return path.startswith("dense")


def problem(case: Case) -> tuple:
    rng = np.random.default_rng(0)

    def uniform(*shape):
        return np.float32(rng.uniform(-1, 1, shape) / np.sqrt(np.prod(shape[:-1]) or 1))

    params = {
        "dense": [
            (uniform(a, b), uniform(b)) for a, b in zip(case.sizes, case.sizes[1:], strict=False)
        ]
    }
    shape = case.sizes[:1]
    if case.images:
        params["frozen"] = [uniform(4, 4, 1, 16), uniform(4, 4, 16, 32)]
        shape = (28, 28, 1)
    classes = case.sizes[-1]
    labels = rng.integers(0, max(2, classes), case.records).astype(
        np.float32 if classes == 1 else np.int32
    )
    return params, {"x": np.float32(rng.uniform(0, 1, (case.records, *shape))), "y": labels}


def baselines(case: Case, params, names: tuple[str, ...] = ("dense",)) -> dict[str, Callable]:
    """Returns trainings of the parameters of these names by clipped gradients."""
    rest = {name: leaves for name, leaves in params.items() if name not in names}

    def gradient(moving, example):
        grads = jax.grad(lambda moving: loss(moving | rest, example))(moving)
        return jax.tree.map(lambda g: jnp.clip(g, -case.clip, case.clip), grads)

    def steps(total):
        def train(moving, data):
            for t in range(case.steps):
                rate = case.learning_rate / (1 + case.lr_decay * t) / case.records
                grads = total(moving, data)
                moving = jax.tree.map(lambda p, g, rate=rate: p - rate * g, moving, grads)
            return moving

        return jax.jit(train)

    def at_once(moving, data):
        return jax.tree.map(lambda g: g.sum(0), jax.vmap(gradient, (None, 0))(moving, data))

    def streamed(moving, data):
        def add(sums, example):
            return jax.tree.map(jnp.add, sums, gradient(moving, example)), None

        return lax.scan(add, jax.tree.map(jnp.zeros_like, moving), data)[0]

    return {"vmap": steps(at_once), "streamed": steps(streamed)}


VARIANTS = {"bounds": KS, "one k": (1,)}


def settings_of(case: Case) -> dict:
    return {
        "clip": case.clip,
        "learning_rate": case.learning_rate,
        "lr_decay": case.lr_decay,
        "batch_size": case.records,
        "epochs": case.steps,
        "trainable": trained,
    }


def step_of(case: Case, params, data, ks, **options) -> tuple[Callable, Callable]:
    """Returns a step that bounds a training, and its arguments as a function of a state.

    The first step has no state. A later one has that of the step before, with as many boxes as
    distances.
    """
    training = plan.Training(**{"threat": "add_remove", **settings_of(case), **options})
    static, arrays = plan.make_plan(loss, params, data, checks.distances(ks), training)
    moving, frozen, records, order, rates = arrays

    @jax.jit
    def step(frozen, records, state, rows, rate):
        return agt._batch_step(loss, static, frozen, records, state, rows, rate, None)

    def arguments(state=None):
        state = agt._State(moving, [], None) if state is None else state
        return frozen, records, state, order[0], rates[0]

    return step, arguments


def run_case(case: Case, rounds: int) -> dict:
    params, data = problem(case)
    on_device = jax.tree.map(jnp.asarray, ({"dense": params["dense"]}, data))
    trainings = baselines(case, params)
    calls = {name: functools.partial(train, *on_device) for name, train in trainings.items()}

    def bounds(ks):
        result = train_with_bounds(loss, params, data, ks=ks, **settings_of(case))
        return result.lower["dense"]

    calls |= {name: functools.partial(bounds, ks) for name, ks in VARIANTS.items()}
    rows = {}
    for name, call in calls.items():
        start = time.perf_counter()
        jax.block_until_ready(call())
        rows[name] = {"first_call_s": time.perf_counter() - start}
    # Lowering fills the caches of tracing, so it comes after the first calls.
    for name, train in trainings.items():
        rows[name]["memory_mb"] = timing.allocated_mb(train.lower(*on_device).compile())
    for name, ks in VARIANTS.items():
        step, arguments = step_of(case, params, data, ks)
        later = step.lower(*arguments(step.lower(*arguments()).out_info))
        rows[name]["memory_mb"] = timing.allocated_mb(later.compile())
    wall, cpu = timing.interleaved(calls, rounds, warm=False)  # a call is a whole training
    for name in calls:
        rows[name]["wall_ms"] = timing.median_ms(wall[name])
        rows[name]["cpu_s"] = statistics.median(cpu[name])
        for base in ("streamed", "vmap"):
            rows[name][f"wall_over_{base}"] = timing.median_ratio(wall[name], wall[base])
    return rows


FLAGS = {
    "cases": ("", f"parts of names, separated by semicolons, of {'; '.join(CASES)}"),
    "rounds": 7,
}


def measure(flags) -> dict:
    keep_freed_memory()
    names = timing.chosen(CASES, flags.cases)
    cases = timing.each(names, lambda name: run_case(CASES[name], flags.rounds))
    return {"rounds": flags.rounds, "ks": KS, "cases": cases}
