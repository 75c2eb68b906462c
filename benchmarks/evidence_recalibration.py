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

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
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
from jaxdp.report import format_table, plot_panels
from launch import results

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "evidence_recalibration.json"
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

    def finish(self, state: Any) -> jax.Array:
        """Fits a, b and c by Fisher scoring with the weights of `LogisticBinning`, and priors
        around 1, 1 and 0."""
        variance, answer = state
        right, wrong = jnp.split(answer, 2)
        total = jnp.maximum(right + wrong, 0)
        design = _design(jnp.array(self.places))
        deviations = jnp.array([self.slope_sd, self.slope_sd, self.shift_sd])
        precision = jnp.diag(deviations**-2)

        def step(_: int, line: jax.Array) -> jax.Array:
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


def vector_scaling(
    records: Records, rng: np.random.Generator, *, private: bool, rounds: int = 5
) -> Any:
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


def _fitted(method: Any, own: Records, test: Records, rng: np.random.Generator) -> dict[str, float]:
    """Returns the scores of a method of the library, with simulated noise of its sources."""
    scale = recalibration.noise_scale(
        method,
        epsilon=EPSILON,
        adjacency="add_remove",
        num_classes=test.logits.shape[1],
    )
    variance = scale.variance * SOURCES

    def ask(k: int, temperature: Any) -> Any:
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


def further(folder: pathlib.Path) -> list[dict[str, Any]]:
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
            row: dict[str, Any] = {"shift": path.stem}
            row["none"] = _floats(_scores_of(test.logits, test.labels))
            for name, method in METHODS.items():
                row[name] = _fitted(method, own, test, rng)
            for name, private in (("vector scaling", True), ("vector scaling, no privacy", False)):
                slopes, shifts = vector_scaling(own, rng, private=private)
                scaled = slopes * test.logits + shifts
                row[name] = _floats(_scores_of(scaled, test.labels))
            rows.append(row)
    return rows


def _floats(scores: Any) -> dict[str, float]:
    return {name: round(float(value), 5) for name, value in scores.items()}


def summary(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what the page needs of a finished workdir."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    shifts = [shift for shift in result["cells"] if shift != "clean"]
    factors = ("sources", "samples", "epsilon")
    methods = {}
    for cost in result["costs"]:
        name = cost["method"]
        cells = [result["cells"][shift][name] for shift in shifts]
        scores = {}
        for part in (*factors, "centre", "no privacy"):
            scores[part] = _rounded(cells, part, "ece")
        scores["brier"] = _rounded(cells, "centre", "brier")
        methods[name] = scores
    accuracy = result["accuracy"]
    shifted = np.mean([accuracy[shift] for shift in shifts])
    return {
        "images": result["images"],
        "trials": result["trials"],
        "shifts": len(shifts),
        "clean": accuracy["clean"],
        "shifted": float(shifted),
        "settings": {part: p for part, p in result["settings"].items() if part in factors},
        "methods": methods,
        "further": further(folder),
    }


def _rounded(cells: list[Any], part: str, score: str) -> list[list[float]]:
    """Returns a score as [shift][setting], with five decimals, which keeps the file small."""
    rows = []
    for cell in cells:
        rows.append([round(value, 5) for value in cell[part][score]])
    return rows


def tables(report: Any, earlier: Any) -> dict[str, str]:
    """Returns the tables of docs/results/recalibration.md."""
    networks = []
    for network, run in report.items():
        row = {"network": network} | results.only(run, "images", "trials", "shifts")
        for images in ("clean", "shifted"):
            row[images] = results.percent(run[images])
        networks.append(row)
    hundred = []
    for name, scores in report["cifar100"]["methods"].items():
        hundred.append({"method": name} | _scores(name, scores))
    before = []
    for name, (every, centre, brier) in earlier["rows"].items():
        before.append({"method": name, "all": every, "centre": centre, "Brier": brier})
    public = {network: run for network, run in report.items() if network != "cifar100"}
    rows = {
        "networks": networks,
        "methods": _method_rows(public),
        "class-wise": _class_wise_rows(public),
        "differences": _difference_rows(public),
        "cifar100": hundred,
        "b": before,
        "epsilons": _epsilon_rows(public),
        "few or many": _division_rows({"resnet20": report["resnet20"]}),
    }
    return {title: format_table(lines, style="markdown") for title, lines in rows.items()}


def _method_rows(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name in next(iter(runs.values()))["methods"]:
        row = {"method": name}
        for network, run in runs.items():
            scores = _scores(name, run["methods"][name])
            row |= {f"{network}, {score}": value for score, value in scores.items()}
        rows.append(row)
    return rows


def _epsilon_rows(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns rows of mean errors at the lowest, a middle and the highest epsilon, and without."""
    rows = []
    names = [name for name in next(iter(runs.values()))["methods"] if name != "none"]
    for name in names:
        row = {"method": name}
        for network, run in runs.items():
            scores = run["methods"][name]
            for column, (_, _, epsilon) in enumerate(run["settings"]["epsilon"]):
                if epsilon in EPSILONS:
                    errors = [of_shift[column] for of_shift in scores["epsilon"]]
                    row[f"{network}, epsilon {epsilon:g}"] = _error(errors)
            row[f"{network}, no privacy"] = _error(np.ravel(scores["no privacy"]))
        rows.append(row)
    return rows


def _division_rows(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns rows of mean errors of few and of many sources that have the same records in all.

    The sweep of sources has 10 records each, and the sweep of samples has 50 sources.
    """
    rows = []
    names = [name for name in next(iter(runs.values()))["methods"] if name != "none"]
    for name in names:
        row = {"method": name}
        for network, run in runs.items():
            scores, settings = run["methods"][name], run["settings"]
            for part in ("samples", "sources"):
                for column, (sources, samples, _) in enumerate(settings[part]):
                    if sources * samples in RECORDS:
                        errors = [of_shift[column] for of_shift in scores[part]]
                        row[f"{network}, {sources} of {samples}"] = _error(errors)
        rows.append(row)
    return rows


def _class_wise_rows(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    methods = ("none", "Acc-T wide", "Acc-T bisection", "logistic binning", "beta binning")
    rows = []
    for name in (*methods, "vector scaling", "vector scaling, no privacy"):
        row = {"method": name}
        for network, run in runs.items():
            for score in ("ece", "classwise", "adaptive"):
                # A binning has a confidence in the first class only.
                if score not in run["further"][0][name]:
                    continue
                errors = _by_shift(run["further"], lambda r, n=name, s=score: r[n][s])
                row[f"{network}, {score}"] = _error(errors)
        rows.append(row)
    return rows


def _difference_rows(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    base = "logistic binning"
    rows = []
    for name in ("beta binning", "vector scaling", "Acc-T bisection"):
        row = {f"method, less {base}": name}
        for network, run in runs.items():
            gaps = _by_shift(run["further"], lambda r, n=name: r[n]["ece"] - r[base]["ece"])
            row[network] = _error(gaps)
        rows.append(row)
    return rows


def _scores(name: str, one: Any) -> dict[str, str]:
    """Returns what a table shows of a method on a network."""
    every = np.concatenate([np.ravel(one[part]) for part in ("sources", "samples", "epsilon")])
    row = {
        "all": f"{np.median(every):.3f} / {np.mean(every):.3f}",
        "centre": _error(np.ravel(one["centre"])),
        "Brier": f"{np.mean(one['brier']):.3f}",
    }
    if name not in ("none", "one source"):
        row["no privacy"] = _error(np.ravel(one["no privacy"]))
    return row


def _by_shift(rows: Any, value: Any) -> list[float]:
    of_shift: dict[str, list[float]] = {}
    for row in rows:
        of_shift.setdefault(row["shift"], []).append(value(row))
    return [float(np.mean(values)) for values in of_shift.values()]


def _error(values: Any) -> str:
    """Returns a mean over shifts with its standard error."""
    mean, _, error = results.moments(values)
    return f"{mean:.3f} ({error:.3f})"


def draw(network: str, report: Any, _: Any, path: pathlib.Path) -> None:
    """Draws the picture of a network: the mean error over shifts."""
    run = report[network]
    methods = (
        "Acc-T wide",
        "HB published",
        "one source",
        "Acc-T bisection",
        "logistic binning",
        "none",
    )
    panels = {}
    for axis, part in enumerate(("sources", "samples", "epsilon")):
        at = [point[axis] for point in run["settings"][part]]
        curves = {}
        for name in methods:
            means = np.mean(run["methods"][name][part], axis=0)
            curves[name] = list(zip(at, means.tolist(), strict=True))
        panels[f"{network}: {part}"] = (part, curves)
    plot_panels(
        path,
        panels,
        title=f"Recalibration of a CIFAR-10 network under {run['shifts']} shifts",
        subtitle="Mean expected calibration error over shifts. One factor varies, the others are "
        "those of the paper.",
        ylabel="ECE",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdirs", required=True, help="finished workdirs, separated by commas")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    report = timing.earlier(flags.output)
    for folder in map(pathlib.Path, flags.workdirs.split(",")):
        report[folder.name] = summary(folder)
    return report
