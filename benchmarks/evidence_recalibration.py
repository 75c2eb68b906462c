r"""The claims of Luo et al. 2020 on CIFAR-10: the tables of runs of launch.recalibrate, and four
further comparisons.

    python -m launch.recalibrate --config configs/recalibration/cifar10.py:checkpoint \
        --workdir W/resnet20 ...
    python -m launch.recalibrate --config configs/recalibration/cifar10.py:resnet56 \
        --workdir W/resnet56 ...
    python -m launch.recalibrate --config configs/recalibration/cifar10.py:cifar100 \
        --workdir W/cifar100 ...
    python -m benchmarks run evidence_recalibration --update \
        --workdirs W/resnet20,W/resnet56,W/cifar100
    python -m benchmarks.evidence results/recalibration.md

The docstring of the config has the whole commands. The further comparisons are at the centre (50
sources of 30, epsilon
1) under the 15 shifts, with the same records and ten trials: class-wise and adaptive errors of
   temperatures, and beta and vector scaling, which are methods of this file."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import pages, timing
from jaxdp import recalibration
from jaxdp.files import read_npz
from jaxdp.recalibration import (
    AccBisection,
    AccT,
    Bracket,
    LogisticBinning,
    Records,
    classwise_ece,
    ece,
)
from jaxdp.report import plot_panels
from launch import results

TRIALS = 10
SOURCES = 50
SAMPLES = 30
EPSILON = 1.0
RECORDS = (1500, 2500)  # of the table of few or many sources
EPSILONS = (0.2, 1.0, 2.0)  # of the table of epsilons
PRIOR = jnp.array([1.0, 1.0, 0.0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class BetaBinning(LogisticBinning):
    """Beta calibration (Kull et al. 2017) of noisy bins: sigmoid(a log p - b log(1 - p) + c)."""

    def finish(self, state) -> jax.Array:
        """Fits a, b and c by Fisher scoring with the weights of `LogisticBinning`, and priors
        around 1, 1 and 0."""
        variance, answer = state
        right, wrong = jnp.split(answer, 2)
        total = jnp.maximum(right + wrong, 0)
        design = _design(jnp.array(self.places))
        deviations = jnp.array([self.slope_sd, self.slope_sd, self.shift_sd])
        precision = jnp.diag(deviations**-2)

        def step(_, line):
            q = jax.nn.sigmoid(design @ line)
            slope = total * q * (1 - q)
            spread = variance * ((1 - q) ** 2 + q**2) + slope
            weight = slope / jnp.maximum(spread, 1e-6)
            residual = (1 - q) * right - q * wrong
            gradient = design.T @ (weight * residual) - precision @ (line - PRIOR)
            weighted = design * (weight * slope)[:, None]
            curvature = weighted.T @ design + precision
            change = jnp.linalg.solve(curvature, gradient)
            return line + 0.7 * jnp.clip(change, -1, 1)

        return jax.lax.fori_loop(0, self.steps, step, PRIOR)

    def curve(self, parameters: jax.Array, score: jax.Array) -> jax.Array:
        """Computes sigmoid(a log p - b log(1 - p) + c)."""
        return jax.nn.sigmoid(_design(score) @ parameters)


def _design(score: jax.Array) -> jax.Array:
    """Returns log p, -log(1 - p) and 1 of log-odds, [..., 3]."""
    log_p = -jax.nn.softplus(-score)
    return jnp.stack([log_p, jax.nn.softplus(score), jnp.ones(score.shape)], -1)


def vector_scaling(records: Records, rng: np.random.Generator, *, private: bool, rounds: int = 5):
    """Returns scales and shifts [m] of the logits, from noisy clipped gradients (Guo et al. 2017,
    section 4.2).

    A record's gradient of its negative log likelihood is clipped to an L1 norm of 2. A round is
    then (epsilon / rounds)-DP with Laplace noise of scale 2 rounds / epsilon at every source."""
    logits = np.asarray(records.logits)
    labels = np.asarray(records.labels)
    classes = logits.shape[1]
    unit = 10.0  # of logits, so that scales and shifts have gradients of like sizes
    rates = np.array([[1 / unit], [1.0]])
    line = np.stack([np.full(classes, 0.5), np.zeros(classes)])
    for _ in range(rounds if private else 200):
        p = np.asarray(jax.nn.softmax(line[0] * logits + line[1]))
        residual = p - np.eye(classes)[labels]
        each = np.stack([residual * logits / unit, residual], 1)
        norms = np.abs(each).sum((1, 2), keepdims=True)
        each *= np.minimum(1, 2 / np.maximum(norms, 1e-9))
        total = each.sum(0)
        if private:
            noise = rng.laplace(size=(SOURCES, *total.shape)).sum(0)
            total += noise * 2 * rounds / EPSILON
        line -= rates * total / (SOURCES * SAMPLES)
    return line


METHODS = {
    "Acc-T wide": AccT(bracket=Bracket.of((0.5, 16.0), "log")),
    "Acc-T bisection": AccBisection(bracket=Bracket.of((0.5, 16.0), "log")),
    "logistic binning": LogisticBinning(),
    "beta binning": BetaBinning(),
}
_finished = jax.jit(lambda method, state: method.finish(state), static_argnums=0)


@jax.jit
def _scores_of(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Returns the calibration errors of logits: of the answer, and of all classes."""
    p = jax.nn.softmax(logits)
    return {
        "ece": ece(p.max(1), p.argmax(1) == labels),
        "classwise": classwise_ece(p, labels),
        "adaptive": classwise_ece(p, labels, binning="equal_mass"),
    }


def _fitted(method, own: Records, test: Records, rng: np.random.Generator) -> dict[str, float]:
    """Returns the scores of a method of the library, with simulated noise of its sources."""
    terms = {"adjacency": "add_remove", "num_classes": test.logits.shape[1]}
    scale = recalibration.noise_scale(method, epsilon=EPSILON, **terms)
    variance = scale.variance * SOURCES

    def ask(k, temperature):
        exact = method.summand(k, own, temperature).sum(0)
        noise = rng.laplace(size=(SOURCES, *exact.shape)).sum(0)
        return exact + noise * scale.noise * scale.step

    if isinstance(method, LogisticBinning):
        answer = jnp.asarray(ask(0, 1.0), jnp.float32)
        parameters = _finished(method, (jnp.float32(variance), answer))
        confidence = method.confidence(parameters, test.logits)
        return {"ece": float(ece(confidence, test.correct))}
    temperature = recalibration.play(method, ask, variance).temperature
    return _floats(_scores_of(test.logits / temperature, test.labels))


def further(folder: pathlib.Path) -> list[dict]:
    """Returns the scores of each shift and trial."""
    rows = []
    for path in sorted((folder / "logits").glob("*.npz")):
        if path.stem == "clean":
            continue
        arrays = read_npz(path)
        everyone = Records(jnp.asarray(arrays["logits"]), jnp.asarray(arrays["labels"]))
        for trial in range(TRIALS):
            rng = np.random.default_rng([trial, len(rows)])
            order = rng.permutation(len(everyone.labels))
            used, rest = np.split(order, [SOURCES * SAMPLES])
            own = Records(*(column[used] for column in everyone))
            test = Records(*(column[rest] for column in everyone))
            row = {"shift": path.stem}
            row["none"] = _floats(_scores_of(test.logits, test.labels))
            for name, method in METHODS.items():
                row[name] = _fitted(method, own, test, rng)
            for name, private in (("vector scaling", True), ("vector scaling, no privacy", False)):
                slopes, shifts = vector_scaling(own, rng, private=private)
                scaled = slopes * test.logits + shifts
                row[name] = _floats(_scores_of(scaled, test.labels))
            rows.append(row)
    return rows


def _floats(scores) -> dict[str, float]:
    return {name: round(float(value), 5) for name, value in scores.items()}


FACTORS = ("sources", "samples", "epsilon")


def result_of(folder: pathlib.Path):
    """Returns the result of a finished workdir."""
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def rounded(cells: Iterable, part: str, score: str = "ece") -> list[list[float]]:
    """Returns a score as [shift][setting], with five decimals, which keeps the file small."""
    return [[round(value, 5) for value in cell[part][score]] for cell in cells]


def summary(folder: pathlib.Path) -> dict:
    """Returns what the page needs of a finished workdir."""
    result = result_of(folder)
    shifts = [shift for shift in result["cells"] if shift != "clean"]
    methods = {}
    for cost in result["costs"]:
        name = cost["method"]
        cells = [result["cells"][shift][name] for shift in shifts]
        scores = {part: rounded(cells, part) for part in (*FACTORS, "centre", "no privacy")}
        methods[name] = scores | {"brier": rounded(cells, "centre", "brier")}
    accuracy = result["accuracy"]
    shifted = np.mean([accuracy[shift] for shift in shifts])
    return {
        "images": result["images"],
        "trials": result["trials"],
        "shifts": len(shifts),
        "clean": accuracy["clean"],
        "shifted": float(shifted),
        "settings": {part: p for part, p in result["settings"].items() if part in FACTORS},
        "methods": methods,
        "further": further(folder),
    }


FURTHER = ("none", *METHODS, "vector scaling", "vector scaling, no privacy")


def tables(report, earlier) -> dict:
    networks = []
    for network, run in report.items():
        row = {"network": network} | results.only(run, "images", "trials", "shifts")
        networks.append(row | {of: results.percent(run[of]) for of in ("clean", "shifted")})
    before = []
    for name, (every, centre, brier) in earlier["rows"].items():
        before.append({"method": name, "all": every, "centre": centre, "Brier": brier})
    hundred = report["cifar100"]
    public = {network: run for network, run in report.items() if network != "cifar100"}
    names = list(public["resnet20"]["methods"])
    private = [name for name in names if name != "none"]
    return {
        "networks": networks,
        "methods": _by_network(public, names, _scores),
        "class-wise": _by_network(public, FURTHER, _class_wise),
        "differences": _by_network(public, COMPARED, _difference, f"method, less {BASE}"),
        "cifar100": [{"method": name} | _scores(hundred, name) for name in hundred["methods"]],
        "b": before,
        "epsilons": _by_network(public, private, _epsilons),
        "few or many": _by_network({"resnet20": report["resnet20"]}, private, _division),
    }


def _by_network(
    runs: Mapping,
    names: Iterable[str],
    cells: Callable,
    head: str = "method",
) -> list[dict[str, str]]:
    """Returns a line for each method, with the cells of each network."""
    lines = []
    for name in names:
        line = {head: name}
        for network, run in runs.items():
            for score, text in cells(run, name).items():
                line[f"{network}, {score}".removesuffix(", ")] = text
        lines.append(line)
    return lines


def _epsilons(run, name: str) -> dict[str, str]:
    """Returns mean errors at the lowest, a middle and the highest epsilon, and without."""
    scores = run["methods"][name]
    cells = {}
    for column, (_, _, epsilon) in enumerate(run["settings"]["epsilon"]):
        if epsilon in EPSILONS:
            cells[f"epsilon {epsilon:g}"] = error([of[column] for of in scores["epsilon"]])
    return cells | {"no privacy": error(scores["no privacy"])}


def _division(run, name: str) -> dict[str, str]:
    """Returns mean errors of few and of many sources that have the same records in all.

    The sweep of sources has 10 records each, and the sweep of samples has 50 sources.
    """
    scores, cells = run["methods"][name], {}
    for part in ("samples", "sources"):
        for column, (sources, samples, _) in enumerate(run["settings"][part]):
            if sources * samples in RECORDS:
                errors = [of_shift[column] for of_shift in scores[part]]
                cells[f"{sources} of {samples}"] = error(errors)
    return cells


def _class_wise(run, name: str) -> dict[str, str]:
    # A binning has a confidence in the first class only.
    there = [
        score for score in ("ece", "classwise", "adaptive") if score in run["further"][0][name]
    ]
    return {score: error(_by_shift(run, lambda row, s=score: row[name][s])) for score in there}


COMPARED, BASE = ("beta binning", "vector scaling", "Acc-T bisection"), "logistic binning"


def _difference(run, name: str) -> dict[str, str]:
    gaps = _by_shift(run, lambda row: row[name]["ece"] - row[BASE]["ece"])
    return {"": error(gaps)}


def _scores(run, name: str) -> dict[str, str]:
    """Returns what a table shows of a method on a network."""
    one = run["methods"][name]
    every = np.concatenate([np.ravel(one[part]) for part in FACTORS])
    row = {
        "all": f"{np.median(every):.3f} / {np.mean(every):.3f}",
        "centre": error(one["centre"]),
        "Brier": f"{np.mean(one['brier']):.3f}",
    }
    if name not in ("none", "one source"):
        row["no privacy"] = error(one["no privacy"])
    return row


def _by_shift(run, value) -> list[float]:
    of_shift = {}
    for row in run["further"]:
        of_shift.setdefault(row["shift"], []).append(value(row))
    return [float(np.mean(values)) for values in of_shift.values()]


def error(values, form: str = ".3f") -> str:
    """Returns a mean over shifts with its standard error."""
    return pages.mean(np.ravel(values), form, scale=1)


DRAWN = ("Acc-T wide", "HB published", "one source", "Acc-T bisection", "logistic binning", "none")


def draw_network(network: str, report, _, path: pathlib.Path):
    """Draws the picture of a network: the mean error over shifts."""
    run = report[network]
    panels = {}
    for axis, part in enumerate(FACTORS):
        at = [point[axis] for point in run["settings"][part]]
        scores = {name: run["methods"][name][part] for name in DRAWN}
        panels[f"{network}: {part}"] = (part, curves(at, scores))
    plot_panels(
        path,
        panels,
        title=f"Recalibration of a CIFAR-10 network under {run['shifts']} shifts",
        subtitle="Mean expected calibration error over shifts. One factor varies, the others are "
        "those of the paper.",
        ylabel="ECE",
    )


def curves(at: Iterable[float], scores: Mapping) -> dict:
    """Returns a curve of means over shifts for each method."""
    means = {name: np.mean(of_shift, axis=0).tolist() for name, of_shift in scores.items()}
    return {name: list(zip(at, mean, strict=True)) for name, mean in means.items()}


draw = functools.partial(draw_network, "resnet20")
draw_resnet56 = functools.partial(draw_network, "resnet56")
FLAGS = {"workdirs": {"required": True, "help": "finished workdirs, separated by commas"}}


def measure(flags) -> dict:
    report = timing.earlier(flags.output)
    for folder in map(pathlib.Path, flags.workdirs.split(",")):
        report[folder.name] = summary(folder)
    return report
