"""The claims of Split Adaptation (arXiv:2503.00441) with a public ViT of CIFAR-10 and five classes
of CIFAR-100.

    python -m launch.split --config configs/split/cifar100.py --workdir W --config.attack.lpips ...
    python -m benchmarks run evidence_split --update --workdir W
    python -m benchmarks.evidence results/split_adaptation.md

The docstring of the config has the whole first command. The second one keeps the rows of the
finished workdir, and the third one writes the page. All images are public benchmarks."""

import argparse
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.datasets import load_sample_images

from configs.split import cifar100
from jaxdp.report import format_table, plot_panels
from launch import results, split_figures
from launch.split_runs import ABLATIONS, BASELINES, SA, SA_ONCE, STOLEN

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "split_cifar100.json"
# Rows of the paper's Table 4 beside ours. It seems to swap the names of the two rows on tuning.
PAPER_ROWS = {
    "without Hilbert augmentation": "without Hilbert augmentation",
    "backend tuned with F_0 only": "without quantisation-aware tuning",
    "backend not tuned": "without OOD quantisation-aware tuning",
    "fresh noise on all copies, no retrieval": "without patch retrieval",
}
PAPER_UPLOADS = {  # of Tables 5 and 6
    "Split learning": ("table 5, SSIM, PSNR, LPIPS", "Split learning"),
    SA: ("table 5, SSIM, PSNR, LPIPS", SA),
    "SA without Laplace noise": ("table 6, SSIM, PSNR, LPIPS", "no Laplace noise"),
    "SA without model noise": ("table 6, SSIM, PSNR, LPIPS", "no noise on the model"),
}
Rows = Sequence[Mapping[str, Any]]
CONFIG = cifar100.get_config()
SHOTS = CONFIG.ablation.shots  # of all tables but the first two
STRONGEST = {
    "noise-aware": "one copy",
    "aggregating": f"median of {1 + CONFIG.client.copies} copies",
}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


# --- The page -----------------------------------------------------------------------------------


def tables(found: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of the run, beside the paper's numbers."""
    rows = found["rows"]
    runs = results.select(rows, part="runs", laplace=1.0)
    rows_of: dict[str, list[dict[str, Any]]] = {
        "accuracy": _accuracy_rows(runs),
        "differences": _difference_rows(runs, paper),
        "ablations": _ablation_rows(runs, paper),
        "rates": _rate_rows(results.select(rows, part="tuning")),
        "stealing": _stealing_rows(runs, paper),
        "reconstruction": _reconstruction_rows(rows, paper),
        "noise": _noise_rows(rows),
        "patches": _swept(rows, "patches", "share of replaced patches"),
        "copies": _swept(rows, "copies", "copies"),
        "private mode": _private_rows(rows),
    }
    return {name: format_table(lines, style="markdown") for name, lines in rows_of.items() if lines}


def _with_runs(names: Iterable[str], runs: Rows) -> list[str]:
    return [name for name in names if results.select(runs, method=name)]


def _shots(runs: Rows) -> list[int]:
    return sorted({row["shots"] for row in runs})


def _accuracy_rows(runs: Rows) -> list[dict[str, Any]]:
    lines = []
    for method in _with_runs((*BASELINES, SA), runs):
        line = {"method": method}
        for shots in _shots(runs):
            line[f"{shots} shots"] = mean(results.select(runs, method=method, shots=shots))
        lines.append(line)
    return lines


def _difference_rows(runs: Rows, paper: Mapping[str, Any]) -> list[dict[str, Any]]:
    published = {row["method"]: float(row["5 shots"].split()[0]) for row in paper["table 1"]}
    lines = []
    for method in _with_runs(BASELINES, runs):
        line = {"Split Adaptation less": method}
        for shots in _shots(runs):
            line[f"{shots} shots"] = _gain(runs, method, shots)
        line["paper, 5 shots"] = f"{published[SA] - published[method]:+.2f}"
        lines.append(line)
    return lines


def _ablation_rows(runs: Rows, paper: Mapping[str, Any]) -> list[dict[str, Any]]:
    published = paper["table 4, 5 shots"]
    lines = []
    for variant in _with_runs(ABLATIONS, runs):
        line = {
            "variant": variant,
            "accuracy": mean(results.select(runs, method=variant, shots=SHOTS)),
            "Split Adaptation less this": None,
            "paper": None,
        }
        if variant != SA:
            line["Split Adaptation less this"] = _gain(runs, variant, SHOTS)
        if variant in PAPER_ROWS:
            line["paper"] = f"{published[SA] - published[PAPER_ROWS[variant]]:+.2f}"
        lines.append(line)
    return lines


def _rate_rows(tuning: Rows) -> list[dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for row in sorted(tuning, key=lambda row: row["rate"]):
        line = lines.setdefault(row["method"], {"method": row["method"]})
        line[f"rate {row['rate']:g}"] = results.percent(row["accuracy"])
    return [lines[method] for method in dict.fromkeys(row["method"] for row in tuning)]


def _stealing_rows(runs: Rows, paper: Mapping[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for model in _with_runs((*STOLEN, SA), runs):
        accuracy = mean(results.select(runs, method=model, shots=SHOTS))
        published = _shown(paper["table 3"].get(model))
        lines.append({"model": model, "accuracy": accuracy, "paper": published})
    return lines


def _reconstruction_rows(rows: Rows, paper: Mapping[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for row in _uploads(rows):
        for attacker, scores in row["attackers"].items():
            # The paper's numbers stand beside one attacker only.
            published = _published(paper, row["upload"]) if attacker == "noise-aware" else None
            lines.append(
                {
                    "upload": row["upload"],
                    "attacker": attacker,
                    "PSNR, dB": score(scores["psnr"]),
                    "SSIM (11)": score(scores["ssim_gaussian11"]),
                    "LPIPS": score(scores["lpips"]),
                    "paper: PSNR, SSIM, LPIPS": published,
                }
            )
    return lines


def _noise_rows(rows: Rows) -> list[dict[str, Any]]:
    lines = []
    for scale, attackers in _attacks(rows).items():
        line = {"scale b": f"{scale:g}"}
        for method in (SA, SA_ONCE):
            line[method] = mean(_noisy(rows, method, scale))
        for attacker, title in STRONGEST.items():
            line[f"PSNR, {title}"] = score(attackers[attacker]["psnr"])
        lines.append(line)
    return lines


def _private_rows(rows: Rows) -> list[dict[str, Any]]:
    lines = []
    for (epsilon, shots), runs in _private(rows).items():
        line = {"epsilon": f"{epsilon:g}", "images of a class": str(shots)}
        lines.append(line | {"accuracy": mean(runs)})
    return lines


def draw(found: Mapping[str, Any], _: Any, path: pathlib.Path) -> None:
    """Draws Figure 4: accuracy against what two attackers reconstruct, a point for each scale of
    the noise."""
    rows = found["rows"]
    attacks = _attacks(rows)
    accuracy = {scale: results.over_seeds(_noisy(rows, SA, scale)).mean for scale in attacks}
    panels = {}
    for score, title in (("psnr", "PSNR in dB"), ("ssim_gaussian11", "SSIM")):
        curves: dict[str, list[tuple[float, float]]] = {}
        for attacker in reversed(STRONGEST):
            curve = []
            for scale, of_scale in attacks.items():
                curve.append((of_scale[attacker][score]["mean"], accuracy[scale]))
            curves[STRONGEST[attacker]] = curve
        panels[title] = (title, curves)
    plot_panels(
        path,
        panels,
        title="Accuracy against reconstruction",
        subtitle=f"Laplace noise of {len(accuracy)} scales, {SHOTS} images of each of five "
        "classes. Attackers take one copy, or the median of all.",
        ylabel="accuracy",
        percent=True,
    )


def draw_hilbert(_found: Any, _paper: Any, path: pathlib.Path) -> None:
    """Draws the Hilbert augmentation of two photographs that come with scikit-learn."""
    squares = []
    for photograph in load_sample_images().images:
        thirds = photograph[:426, :639].reshape(142, 3, 213, 3, 3)  # of [427, 640, 3]
        small = thirds.mean((1, 3), dtype=np.float32) / 255
        squares.append(small[:, :142])
    split_figures.draw_hilbert(np.stack(squares), path)


def _uploads(rows: Rows) -> Iterable[Mapping[str, Any]]:
    named = {row["upload"]: row for row in results.select(rows, part="attacks")}
    others = sorted(named.keys() - PAPER_UPLOADS.keys())
    for name in (*PAPER_UPLOADS, *others):
        if name in named:
            yield named[name]
    private = results.select(rows, part="attacks_private")
    for row in sorted(private, key=lambda row: -row["level"]):
        yield {**row, "upload": f"private mode, epsilon {row['level']:g}"}


def _attacks(rows: Rows) -> dict[float, Any]:
    attacks = results.select(rows, part="attacks_noise")
    attackers = {row["level"]: row["attackers"] for row in attacks}
    return dict(sorted(attackers.items()))


def _noisy(rows: Rows, method: str, scale: float) -> list[Mapping[str, Any]]:
    """Returns the runs with noise of this scale."""
    seeds = tuple(CONFIG.seeds[: CONFIG.noise.seeds])
    runs = results.select(rows, part="runs", method=method, shots=SHOTS, seed=seeds)
    factor = scale / CONFIG.client.laplace
    return [row for row in runs if abs(row["laplace"] / factor - 1) < 1e-3]


def _swept(rows: Rows, part: str, title: str) -> list[dict[str, Any]]:
    runs = results.select(rows, part=part)
    lines = []
    for value in sorted({row["value"] for row in runs}):
        accuracy = mean(results.select(runs, value=value))
        lines.append({title: f"{value:g}", "accuracy": accuracy})
    return lines


def _private(rows: Rows) -> dict[tuple[float, int], list[Mapping[str, Any]]]:
    """Returns the runs of the private mode by epsilon and images of a class."""
    private = results.select(rows, part="private")
    runs: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for row in sorted(private, key=lambda row: row["epsilon"]):
        place = (round(row["epsilon"], 2), row["shots"])
        runs.setdefault(place, []).append(row)
    return runs


def _published(paper: Mapping[str, Any], upload: str) -> str | None:
    if upload not in PAPER_UPLOADS:
        return None
    table, name = PAPER_UPLOADS[upload]
    ssim, psnr, lpips = paper[table][name]
    return f"{psnr:g}, {ssim:g}, {lpips:g}"


def _shown(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def score(moments: Mapping[str, float]) -> str:
    """Returns a mean with its standard error."""
    return f"{moments['mean']:.3g} ({moments['error']:.2g})"


def _gain(runs: Rows, method: str, shots: int) -> str:
    """Returns what Split Adaptation has more on the same draws."""
    ours = {row["seed"]: row["accuracy"] for row in results.select(runs, method=SA, shots=shots)}
    gains = []
    for row in results.select(runs, method=method, shots=shots):
        if row["seed"] in ours:
            gains.append(ours[row["seed"]] - row["accuracy"])
    return percent(gains, "+")


def mean(rows: Rows) -> str:
    """Returns the mean accuracy of rows in percent, with its standard error."""
    return percent([row["accuracy"] for row in rows])


def percent(values: Sequence[float], sign: str = "") -> str:
    """Returns a mean in percent with its standard error, nothing without values."""
    if not values:
        return ""
    mean, _, error = results.moments(values)
    text = f"{100 * mean:{sign}.1f}"
    if len(values) == 1:
        return text
    return f"{text} ({100 * error:.1f})"


def earlier_tables(found: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of earlier runs and of the paper's accuracies, which are kept as text."""
    markdown = {}
    for name, rows in found.items():
        if isinstance(rows, list):
            markdown[f"earlier: {name}"] = format_table(rows, style="markdown")
    markdown["paper: accuracy"] = format_table(paper["table 1"], style="markdown")
    return markdown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="a finished workdir")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    workdir = flags.workdir
    if not (workdir / "result.json").exists():
        raise SystemExit(
            f"--workdir must be finished, but {workdir} has no result.json. Run launch.split to "
            "its end."
        )
    rows = []
    for path in sorted(workdir.glob("cells/**/row.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        if row["part"] != "costs":
            rows.append(_rounded(row))
    return {"rows": rows}
