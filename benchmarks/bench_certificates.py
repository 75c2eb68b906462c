"""Reports how far certificates reach: the mean stable distance per rule.

    python -m benchmarks run certificates --seeds 3

"published" is Abstract Gradient Training as published (threat="replace_per_batch", product="rump"),
with k replacements in every batch. "replace" has k replacements in the whole data set, and
"add_remove" k records added or removed. Data, networks and queries are the same. Batches are
random, and for "add_remove" they follow from a hash of each record."""

from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import bench_prediction, pages, timing
from jaxdp.memory import keep_freed_memory
from jaxdp.prediction import certify, train_with_bounds
from launch import results

KS = 40
RULES = (
    ("published", "replace_per_batch", "rump"),
    ("replace", "replace_one", "tight"),
    ("add_remove", "add_remove", "tight"),
)


class Case(NamedTuple):
    """Gaussian classes around random centres, and a network with one hidden layer."""

    features: int
    hidden: int
    classes: int  # 1: two classes and one logit
    records: int
    batch: int
    epochs: int
    spread: float
    clip: float
    learning_rate: float
    lr_decay: float


CASES = {
    "one logit, batches of 50": Case(6, 16, 1, 200, 50, 2, 0.5, 0.1, 0.5, 0.0),
    "2 classes, 4 full batches": Case(6, 128, 2, 300, 300, 4, 0.35, 0.06, 1.0, 0.6),
    "3 classes, 4 full batches": Case(2, 32, 3, 150, 150, 4, 0.35, 0.1, 1.0, 0.3),
    "4 classes, 2 full batches": Case(2, 32, 4, 400, 400, 2, 0.3, 0.1, 2.0, 0.3),
}


def network(params, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def loss(params, example) -> jax.Array:
    return bench_prediction.loss_of(network(params, example["x"]), example["y"])


def problem(case: Case, seed: int) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    classes = max(2, case.classes)
    centres = rng.normal(size=(classes, case.features))
    centres *= 1.5 / np.linalg.norm(centres, axis=1, keepdims=True)

    def draw(n):
        y = np.arange(n) % classes
        return np.float32(centres[y] + case.spread * rng.normal(size=(n, case.features))), y

    def uniform(*shape):
        return np.float32(rng.uniform(-1, 1, shape) / np.sqrt(shape[0]))

    params = {
        "w0": uniform(case.features, case.hidden),
        "b0": uniform(case.hidden),
        "w1": uniform(case.hidden, case.classes),
        "b1": uniform(case.classes),
    }
    x, y = draw(case.records)
    queries, truth = draw(200)
    labels = y.astype(np.float32 if case.classes == 1 else np.int32)
    return params, {"x": x, "y": labels}, queries, truth


def stable_distances(case: Case, seed: int) -> dict[str, float]:
    params, data, queries, truth = problem(case, seed)
    rng = np.random.default_rng(seed + 1000)
    batches = case.records // case.batch
    order = np.concatenate(
        [rng.permutation(case.records).reshape(batches, case.batch)] * case.epochs
    )
    row = {}
    for name, threat, product in RULES:
        assigned = {"batches": batches} if threat == "add_remove" else {"order": order}
        bounds = train_with_bounds(
            loss,
            params,
            data,
            ks=KS,
            clip=case.clip,
            learning_rate=case.learning_rate,
            lr_decay=case.lr_decay,
            batch_size=case.batch,
            epochs=case.epochs,
            threat=threat,
            product=product,
            **assigned,
        )
        certified = certify(bounds, network, queries, product=product)
        row[name] = float(np.mean(certified.distance))
        row["accuracy"] = float(np.mean(np.asarray(certified.label) == truth))
    return row


def tables(report) -> dict:
    """Returns the table of docs/results/agt.md: mean stable distances with standard errors over
    seeds."""
    heads = ("published", "records replaced", "records added or removed")
    lines = []
    for name, runs in report["cases"].items():
        of = {rule: [run[rule] for run in runs] for rule, *_ in RULES}
        cells = [pages.mean(distances, scale=1) for distances in of.values()]
        gain = np.mean(of["add_remove"]) / np.mean(of["published"])
        line = {"network": name} | dict(zip(heads, cells, strict=True))
        lines.append(line | {"gain": f"{gain:.1f}"})
    return {"certificates": lines}


FLAGS = {"seeds": 3}


def measure(flags) -> dict:
    keep_freed_memory()
    cases, means = {}, {}
    for name, case in CASES.items():
        cases[name] = runs = [stable_distances(case, seed) for seed in range(flags.seeds)]
        means[name] = {rule: results.moments(run[rule] for run in runs).mean for rule in runs[0]}
    queries = f"mean stable distance over 200 queries and {flags.seeds} seeds"
    timing.show(f"{queries}, largest k {KS}", means)
    return {"seeds": flags.seeds, "cases": cases}
