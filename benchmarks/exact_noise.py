"""Exact noise beside noise in floats: the time of a step, and accuracy at equal epsilon.

    python -m benchmarks run exact_noise --update

The steps are those of `benchmarks.gate`, interleaved and warm. Accuracies are those of
`launch.finetune` on the bundled digits. Noise and batches are fresh in every run."""

import argparse
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax

import jaxdp
from benchmarks import gate, timing
from configs import digits_dpsgd
from jaxdp.transforms import noise
from launch import finetune

EPSILONS = (1.0, 2.0, 4.0, 8.0)
FORMS = ("floats", "integers")
PARTS = ("clipped sum", "noise", "both")


# --- Time ---------------------------------------------------------------------------------------


def _calls(problem: Any, part: str) -> dict[str, Any]:
    """Returns compiled calls of a part of a step, in floats and in integers."""
    loss, params, batch = problem
    divisor = len(jax.tree.leaves(batch)[0])
    calls = {}
    for form in FORMS:
        gradient = jaxdp.clipped_grad(loss, clip_norm=1.0)
        key = noise.stream(bytes(16), "exact noise")
        privatizer = jaxdp.privatize(
            gradient, noise_multiplier=1.0, divisor=divisor, key=key, exact=form == "integers"
        )
        gradient = gradient.on_grid(privatizer.grid)
        state = privatizer.init(params)

        def summed(params: Any, batch: Any, gradient: Any = gradient) -> Any:
            return gradient(params, batch).grads

        def noised(sums: Any, state: Any, privatizer: Any = privatizer) -> Any:
            return privatizer.update(sums, state)

        def both(
            params: Any, batch: Any, state: Any, add: Any = noised, total: Any = summed
        ) -> Any:
            return add(total(params, batch), state)

        sums = summed(params, batch)
        functions = {
            "clipped sum": (summed, (params, batch)),
            "noise": (noised, (sums, state)),
            "both": (both, (params, batch, state)),
        }
        function, arguments = functions[part]
        calls[form] = gate.compiled(function, *arguments)
    return calls


def step_times(rounds: int) -> list[dict[str, Any]]:
    """Returns the times of the parts of a step, and their ratios."""
    rows = []
    for case, problem in (("dense", gate.dense()), ("convolution", gate.convolution())):
        for part in PARTS:
            wall, cpu = timing.interleaved(_calls(problem, part), rounds)
            row = {
                "case": case,
                "part": part,
                "floats_ms": timing.median_ms(wall["floats"]),
                "integers_ms": timing.median_ms(wall["integers"]),
                "over_floats": timing.median_ratio(wall["integers"], wall["floats"]),
                "cpu_over_floats": timing.median_ratio(cpu["integers"], cpu["floats"]),
            }
            print(row, flush=True)
            rows.append(row)
    return rows


# --- Accuracy -----------------------------------------------------------------------------------


def accuracy(form: str, epsilon: float) -> float:
    """Returns the accuracy of a run of `launch.finetune`."""
    config = digits_dpsgd.get_config()
    config.references = False
    config.private.evaluate_every = config.private.steps
    config.private.epsilon = epsilon
    config.private.exact = form == "integers"
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "run"
        finetune.experiment(config, str(root))
        result = json.loads((root / "result.json").read_text())
    return float(result.get("accuracy", result.get("private")))


def accuracies(runs: int) -> list[dict[str, Any]]:
    rows = []
    for epsilon in EPSILONS:
        for form in FORMS:
            values = [accuracy(form, epsilon) for _ in range(runs)]
            row = {"epsilon": epsilon, "form": form, "accuracies": values}
            print(row, flush=True)
            rows.append(row)
    return rows


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of a report."""
    lines = []
    for row in report["steps"]:
        ratios = [f"{row[name]:.2f}" for name in ("over_floats", "cpu_over_floats")]
        times = [f"{row[name]:.2f}" for name in ("floats_ms", "integers_ms")]
        lines.append([row["case"], row["part"], *times, *ratios])
    header = ["case", "part", "floats, ms", "integers, ms", "ratio", "ratio of processor time"]
    return {"steps": timing.page_table(header, lines), "accuracy": _accuracy_table(report)}


def _accuracy_table(report: Mapping[str, Any]) -> str:
    lines = []
    for form in FORMS:
        rows = [row for row in report["accuracy"] if row["form"] == form]
        lines.append([form, *map(timing.accuracy, rows)])
    header = ["sums and noise", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS)]
    return timing.page_table(header, lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=4, help="of each form and epsilon")
    parser.add_argument("--rounds", type=int, default=30, help="of the times of a step")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    return {"steps": step_times(flags.rounds), "accuracy": accuracies(flags.runs)}
