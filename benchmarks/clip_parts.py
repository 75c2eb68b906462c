"""Clipping per part beside flat clipping: the time of a step, and accuracy at equal epsilon.

    python -m benchmarks run clip_parts --update

Steps are those of `benchmarks.gate`, interleaved and warm. Each leaf is a part. A network of two
dense layers is trained on bundled sets with one noise multiplier for all methods.
Learning rates are chosen on other splits of the same set. The seed of a row sets its split and its
initial parameters. Noise and batches are fresh. `python -m benchmarks.evidence
results/clip_parts.md` writes the tables of the page."""

import argparse
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import gate, timing
from jaxdp import finetune
from jaxdp.data import PoissonSampler, from_arrays
from jaxdp.privacy import calibrate_noise

STUDIES = ("steps", "digits", "breast_cancer")
EPSILON, DELTA, STEPS, CLIP, HIDDEN = 2.0, 1e-5, 60, 1.0, 32
TEST, RATE = 0.3, 0.2  # the shares of test records, and of private records in a batch
TUNING = (100, 101)  # seeds whose splits choose the learning rates

METHODS = {
    "flat": "sgd",
    "uniform": "sgd",
    "dimension": "sgd",
    "adaptive": "sgd",
    "adaptive per part": "sgd",
    "DP-Adam": "adam",
    "DP-AdamBC": "adam",  # with the paper's floor, 5e-8
    "DP-AdamBC, floor Phi": "adam",  # with the variance of the noise, the default
}
RATES = {
    "sgd": (0.125, 0.25, 0.5, 1.0),
    "adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
}


# --- Time ---------------------------------------------------------------------------------------


def step_times(rounds: int) -> list[dict[str, Any]]:
    """Returns the time of the clipped sum of each case of the gate over that of one norm."""
    rows = []
    for case, problem in (("dense", gate.dense()), ("convolution", gate.convolution())):
        loss, params, batch = problem
        clip_norms: dict[str, Any] = {"flat": CLIP}
        for by in ("uniform", "dimension"):
            clip_norms[by] = jaxdp.split_clip_norm(params, CLIP, by=by)
        calls = {}
        for name, clip_norm in clip_norms.items():
            clipped = jaxdp.clipped_grad(loss, clip_norm=clip_norm)
            calls[name] = gate.compiled(clipped, params, batch)
        wall, cpu = timing.interleaved(calls, rounds)
        for name in calls:
            row = {
                "case": case,
                "clip norms": name,
                "ms": timing.median_ms(wall[name]),
                "over_flat": timing.median_ratio(wall[name], wall["flat"]),
                "cpu_over_flat": timing.median_ratio(cpu[name], cpu["flat"]),
            }
            print(row, flush=True)
            rows.append(row)
    return rows


# --- Accuracy -----------------------------------------------------------------------------------


class Split(NamedTuple):
    """Records of a bundled set in an order that a seed draws, and initial parameters."""

    private: Any
    test: Any
    params: Any


def split(name: str, seed: int) -> Split:
    random = np.random.default_rng(seed)
    whole = jaxdp.data.bundled(name)
    order = random.permutation(len(whole))
    rows = whole.gather(order)
    features = rows["image"] if "image" in rows else rows["features"]
    features = features.reshape(len(whole), -1)
    held = round(TEST * len(whole))
    widths = (features.shape[1], HIDDEN, whole.num_classes)
    params = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        kernel = random.normal(size=(inputs, outputs)) / math.sqrt(inputs)
        bias = np.zeros(outputs, np.float32)
        params[f"layer{layer}"] = {"kernel": kernel.astype(np.float32), "bias": bias}
    private = from_arrays(
        x=features[held:], label=rows["label"][held:], num_classes=whole.num_classes
    )
    return Split(private, (features[:held], rows["label"][:held]), params)


def logits(params: Any, x: Any) -> Any:
    first, last = params["layer0"], params["layer1"]
    hidden = jnp.tanh(x @ first["kernel"] + first["bias"])
    return hidden @ last["kernel"] + last["bias"]


def loss(params: Any, record: Any) -> Any:
    outputs = logits(params, record["x"])
    return jaxdp.losses.softmax_cross_entropy(outputs, record["label"])


def trainer(method: str, params: Any, records: int) -> Any:
    """Returns a trainer whose learning rate is in its state, so that all rates share a program."""
    sampler = PoissonSampler(records, RATE)

    def event(noise_multiplier: float) -> Any:
        return finetune.event(noise_multiplier, sampler, STEPS)

    sigma = calibrate_noise(event, epsilon=EPSILON, delta=DELTA)
    noise_std = sigma * CLIP / sampler.expected_batch_size
    corrected = functools.partial(finetune.dp_adam_bc, noise_std=noise_std)
    optimizers = {
        "DP-Adam": optax.adam,
        "DP-AdamBC": functools.partial(corrected, floor=5e-8),
        "DP-AdamBC, floor Phi": corrected,
    }
    optimizer = optimizers.get(method, functools.partial(optax.sgd, momentum=0.9))
    leaves = jaxdp.split_clip_norm(params, CLIP)
    clip_norms = {
        "uniform": leaves,
        "dimension": jaxdp.split_clip_norm(params, CLIP, by="dimension"),
        "adaptive per part": leaves,
    }
    clip_norm = clip_norms.get(method, CLIP)
    make: Any = finetune.dp_sgd
    if "adaptive" in method:
        # The default B / 20 is too little for four counts of small batches.
        counts = len(leaves) if method == "adaptive per part" else 1
        count_noise = max(sampler.expected_batch_size / 20, math.sqrt(counts) * sigma)
        make = functools.partial(finetune.adp_clip, count_noise=count_noise)
    return make(
        loss,
        optax.inject_hyperparams(lambda learning_rate: optimizer(learning_rate))(1.0),
        sampler=sampler,
        clip_norm=clip_norm,
        noise_multiplier=sigma,
        physical_batch_size=math.ceil(1.5 * RATE * records),
    )


def accuracy(training: Any, rate: float, data: Split) -> float:
    """Trains once, and returns the accuracy on the test records."""
    state = training.init(data.params)
    rates = {**state.opt_state.hyperparams, "learning_rate": jnp.float32(rate)}
    state = state._replace(opt_state=state.opt_state._replace(hyperparams=rates))
    for _ in range(STEPS):
        state, _ = training.step(state, data.private)
    x, label = data.test
    prediction = np.asarray(logits(jax.device_get(state.params), x)).argmax(1)
    return float(np.mean(prediction == label))


def compared(name: str, seeds: int) -> list[dict[str, Any]]:
    """Returns a row for each method of a set."""
    tuning = [split(name, seed) for seed in TUNING]
    splits = [split(name, seed) for seed in range(seeds)]
    rows = []
    for method, optimizer in METHODS.items():
        training = trainer(method, splits[0].params, len(splits[0].private))
        tuned = {}
        for rate in RATES[optimizer]:
            tuned[rate] = statistics.mean(accuracy(training, rate, data) for data in tuning)
        best = max(tuned, key=lambda rate: tuned[rate])
        accuracies = [accuracy(training, best, data) for data in splits]
        row = {
            "method": method,
            "rate": best,
            "tuned": {f"{rate:g}": value for rate, value in tuned.items()},
            "accuracies": accuracies,
        }
        print(row, flush=True)
        rows.append(row)
    return rows


# --- The report and its page --------------------------------------------------------------------


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of docs/results/clip_parts.md."""
    lines = []
    for row in report["steps"]:
        ratios = [f"{row[ratio]:.2f}" for ratio in ("over_flat", "cpu_over_flat")]
        lines.append([row["case"], row["clip norms"], f"{row['ms']:.2f}", *ratios])
    header = ["case", "clip norms", "ms", "over flat", "processor time over flat"]
    markdown = {"steps": timing.page_table(header, lines)}
    for study in STUDIES[1:]:
        if study in report:  # a report may have some studies only
            markdown[study] = _accuracies(report[study])
    return markdown


def _accuracies(rows: Sequence[Mapping[str, Any]]) -> str:
    flat = np.asarray(rows[0]["accuracies"])
    lines = []
    for row in rows:
        accuracies = np.asarray(row["accuracies"])
        cells = [row["method"], f"{row['rate']:g}"]
        for values in (accuracies, accuracies - flat):
            error = values.std(ddof=1) / math.sqrt(len(values))
            cells.append(f"{100 * values.mean():.1f} ({100 * error:.1f})")
        lines.append(cells)
    header = ["method", "learning rate", "accuracy, %", "less flat"]
    return timing.page_table(header, lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--studies", default=",".join(STUDIES), help="the report keeps the others")
    parser.add_argument("--rounds", type=int, default=60, help="of timed steps")
    parser.add_argument("--seeds", type=int, default=8, help="runs of each method")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    report = timing.earlier(flags.output)
    for study in flags.studies.split(","):
        if study == "steps":
            report[study] = step_times(flags.rounds)
        else:
            report[study] = compared(study, flags.seeds)
    return report
