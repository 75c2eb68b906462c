"""Clipping per part beside flat clipping: the time of a step, and accuracy at equal epsilon.

    python -m benchmarks run clip_parts --update

Steps are those of `benchmarks.gate`, interleaved and warm. Each leaf is a part. A network of two
dense layers is trained on bundled sets with one noise multiplier for all methods.
Learning rates are chosen on other splits of the same set. The seed of a row sets its split and its
initial parameters. Noise and batches are fresh."""

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import gate, pages, problems, timing
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


def step_times(rounds: int) -> list[dict]:
    """Returns the time of the clipped sum of each case of the gate over that of one norm."""
    rows = []
    for case, (loss, params, batch) in gate.problems().items():
        clip_norms = {"flat": CLIP}
        for by in ("uniform", "dimension"):
            clip_norms[by] = jaxdp.split_clip_norm(params, CLIP, by=by)
        calls = {}
        for name, clip_norm in clip_norms.items():
            clipped = jaxdp.clipped_grad(loss, clip_norm=clip_norm)
            calls[name] = timing.compiled(clipped, params, batch)
        wall, cpu = timing.interleaved(calls, rounds)
        for name in calls:
            row = {"case": case, "clip norms": name, "ms": timing.median_ms(wall[name])}
            row |= timing.ratios(name, wall, cpu, {"flat": "flat"})
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


def logits(params, x):
    first, last = params["layer0"], params["layer1"]
    hidden = jnp.tanh(x @ first["kernel"] + first["bias"])
    return hidden @ last["kernel"] + last["bias"]


def loss(params, record):
    outputs = logits(params, record["x"])
    return jaxdp.losses.softmax_cross_entropy(outputs, record["label"])


Splits = Mapping[int, Split]


def splits(name: str, seeds: int) -> Splits:
    """Returns the splits of the seeds, and of those that choose the learning rates."""
    return {seed: split(name, seed) for seed in (*range(seeds), *TUNING)}


def noise_multiplier(sampler: PoissonSampler) -> float:
    event = functools.partial(finetune.event, sampler=sampler, steps=STEPS)
    return calibrate_noise(event, epsilon=EPSILON, delta=DELTA)


def trainer(method: str, params, records: int):
    """Returns a trainer whose learning rate is in its state, so that all rates share a program."""
    sampler = PoissonSampler(records, RATE)
    sigma = noise_multiplier(sampler)
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
    make = finetune.dp_sgd
    if "adaptive" in method:
        # The default B / 20 is too little for four counts of small batches.
        counts = len(leaves) if method == "adaptive per part" else 1
        count_noise = max(sampler.expected_batch_size / 20, math.sqrt(counts) * sigma)
        make = functools.partial(finetune.adp_clip, count_noise=count_noise)
    return make(
        loss,
        optax.inject_hyperparams(lambda learning_rate: optimizer(learning_rate))(1.0),
        sampler=sampler,
        clip_norm=clip_norms.get(method, CLIP),
        noise_multiplier=sigma,
        physical_batch_size=math.ceil(1.5 * RATE * records),
    )


def accuracy(training, rate: float, data: Split) -> float:
    """Trains once, and returns the accuracy on the test records."""
    state = problems.trained(training, data.params, data.private, STEPS, rate=rate)
    x, label = data.test
    prediction = np.asarray(logits(jax.device_get(state.params), x)).argmax(1)
    return float(np.mean(prediction == label))


def tuned(
    training, rates: Iterable[float], data: Splits
) -> tuple[float, dict[str, float], list[float]]:
    """Returns the best rate, the accuracy of each, and accuracies of the best on the other splits.

    The splits of `TUNING` choose the rate.
    """
    means = {}
    for rate in rates:
        means[rate] = statistics.mean(accuracy(training, rate, data[seed]) for seed in TUNING)
    best = max(means, key=means.__getitem__)
    accuracies = [accuracy(training, best, data[seed]) for seed in data if seed not in TUNING]
    return best, {f"{rate:g}": mean for rate, mean in means.items()}, accuracies


def row_of(data: Splits, method: str) -> dict:
    training = trainer(method, data[0].params, len(data[0].private))
    rate, means, accuracies = tuned(training, RATES[METHODS[method]], data)
    return {"method": method, "rate": rate, "tuned": means, "accuracies": accuracies}


# --- The report and its page --------------------------------------------------------------------


def tables(report) -> dict:
    columns = {
        "case": "{case}",
        "clip norms": "{clip norms}",
        "ms": "{ms:.2f}",
        "over flat": "{over_flat:.2f}",
        "processor time over flat": "{cpu_over_flat:.2f}",
    }
    markdown = {"steps": pages.lines(report["steps"], columns)}
    for study in STUDIES[1:]:
        if study in report:  # a report may have some studies only
            flat = np.asarray(report[study][0]["accuracies"])
            columns = {
                "method": "{method}",
                "learning rate": "{rate:g}",
                "accuracy, %": lambda row: pages.mean(row["accuracies"]),
                "less flat": lambda row, flat=flat: pages.mean(row["accuracies"] - flat),
            }
            markdown[study] = pages.lines(report[study], columns)
    return markdown


FLAGS = {
    "studies": (",".join(STUDIES), "the report keeps the others"),
    "rounds": (60, "of timed steps"),
    "seeds": (8, "runs of each method"),
}


def measure(flags) -> dict:
    report = timing.earlier(flags.output)
    for study in flags.studies.split(","):
        if study == "steps":
            report[study] = step_times(flags.rounds)
        else:
            data = splits(study, flags.seeds)
            report[study] = timing.swept(functools.partial(row_of, data), METHODS)
    return report
