"""The claims of Split Adaptation (arXiv:2503.00441) with a public ViT of CIFAR-10 and five classes
of CIFAR-100.

    python -m launch.split --config configs/split/cifar100.py --workdir W --config.attack.lpips ...
    python -m benchmarks run evidence_split --update --workdir W
    python -m benchmarks.evidence results/split_adaptation.md

The docstring of the config has the whole first command. The second one keeps the rows of the
finished workdir, and the third one writes the page. All images are public benchmarks."""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.datasets import load_sample_images

from benchmarks import pages, timing
from configs.split import cifar100
from jaxdp.report import plot_panels
from launch import results, split_figures
from launch.split_runs import ABLATIONS, BASELINES, SA, SA_ONCE, STOLEN

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


# --- The page -----------------------------------------------------------------------------------

Lines = list[dict[str, Any]]


def tables(found, paper) -> dict:
    """Returns the tables of the run, beside the paper's numbers."""
    rows = found["rows"]
    runs = results.select(rows, part="runs", laplace=1.0)
    tuning = sorted(results.select(rows, part="tuning"), key=lambda row: row["rate"])
    models = _with_runs((*STOLEN, SA), runs)
    stealing = {
        "model": lambda model: model,
        "accuracy": lambda model: mean(results.select(runs, method=model, shots=SHOTS)),
        "paper": lambda model: _shown(paper["table 3"].get(model)),
    }
    rows_of = {
        "accuracy": _by_shots(
            runs,
            (*BASELINES, SA),
            "method",
            lambda method, shots: mean(results.select(runs, method=method, shots=shots)),
        ),
        "differences": _difference_rows(runs, paper),
        "ablations": _ablation_rows(runs, paper),
        "rates": results.pivot(tuning, "method", "rate", _tuned, heading="rate {:g}"),
        "stealing": pages.lines(models, stealing),
        "reconstruction": _reconstruction_rows(rows, paper),
        "noise": _noise_rows(rows),
        "patches": _swept(rows, "patches", "share of replaced patches"),
        "copies": _swept(rows, "copies", "copies"),
        "private mode": _private_rows(rows),
    }
    return {name: lines for name, lines in rows_of.items() if lines}


def _tuned(rows: Rows) -> str:
    (row,) = rows
    return results.percent(row["accuracy"])


def _with_runs(names: Iterable[str], runs: Rows) -> list[str]:
    return [name for name in names if results.select(runs, method=name)]


def _by_shots(runs: Rows, names: Iterable[str], head: str, cell: Callable) -> Lines:
    """Returns a line for each method that has runs, and a column for each number of shots."""
    every = sorted({row["shots"] for row in runs})
    lines = []
    for name in _with_runs(names, runs):
        lines.append({head: name} | {f"{shots} shots": cell(name, shots) for shots in every})
    return lines


def _difference_rows(runs: Rows, paper: Mapping) -> Lines:
    published = {row["method"]: float(row["5 shots"].split()[0]) for row in paper["table 1"]}
    head = "Split Adaptation less"
    lines = _by_shots(runs, BASELINES, head, lambda method, shots: _gain(runs, method, shots))
    for line in lines:
        line["paper, 5 shots"] = f"{published[SA] - published[line[head]]:+.2f}"
    return lines


def _ablation_rows(runs: Rows, paper: Mapping) -> Lines:
    published = paper["table 4, 5 shots"]
    lines = []
    for variant in _with_runs(ABLATIONS, runs):
        accuracy = mean(results.select(runs, method=variant, shots=SHOTS))
        line = {"variant": variant, "accuracy": accuracy}
        line["Split Adaptation less this"] = None if variant == SA else _gain(runs, variant, SHOTS)
        line["paper"] = None
        if variant in PAPER_ROWS:
            line["paper"] = f"{published[SA] - published[PAPER_ROWS[variant]]:+.2f}"
        lines.append(line)
    return lines


def _reconstruction_rows(rows: Rows, paper: Mapping) -> Lines:
    lines = []
    for row in _uploads(rows):
        for attacker, scores in row["attackers"].items():
            line = {"upload": row["upload"], "attacker": attacker}
            for title, of in (("PSNR, dB", "psnr"), ("SSIM (11)", "ssim_gaussian11")):
                line[title] = score(scores[of])
            line["LPIPS"] = score(scores["lpips"])
            # The paper's numbers stand beside one attacker only.
            published = _published(paper, row["upload"]) if attacker == "noise-aware" else None
            lines.append(line | {"paper: PSNR, SSIM, LPIPS": published})
    return lines


def _noise_rows(rows: Rows) -> Lines:
    lines = []
    for scale, attackers in _attacks(rows).items():
        line = {"scale b": f"{scale:g}"}
        for method in (SA, SA_ONCE):
            line[method] = mean(_noisy(rows, method, scale))
        for attacker, title in STRONGEST.items():
            line[f"PSNR, {title}"] = score(attackers[attacker]["psnr"])
        lines.append(line)
    return lines


def _private_rows(rows: Rows) -> Lines:
    """Returns the accuracy of the private mode by epsilon and images of a class."""
    runs = {}
    for row in sorted(results.select(rows, part="private"), key=lambda row: row["epsilon"]):
        runs.setdefault((round(row["epsilon"], 2), row["shots"]), []).append(row)
    columns = {
        "epsilon": lambda item: f"{item[0][0]:g}",
        "images of a class": lambda item: str(item[0][1]),
        "accuracy": lambda item: mean(item[1]),
    }
    return pages.lines(runs.items(), columns)


def draw(found: Mapping, _, path: pathlib.Path):
    """Draws Figure 4: accuracy against what two attackers reconstruct, a point for each scale of
    the noise."""
    rows = found["rows"]
    attacks = _attacks(rows)
    accuracy = {scale: results.over_seeds(_noisy(rows, SA, scale)).mean for scale in attacks}
    panels = {}
    for score, title in (("psnr", "PSNR in dB"), ("ssim_gaussian11", "SSIM")):
        curves = {}
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


def draw_hilbert(_found, _paper, path: pathlib.Path):
    """Draws the Hilbert augmentation of two photographs that come with scikit-learn."""
    squares = []
    for photograph in load_sample_images().images:
        thirds = photograph[:426, :639].reshape(142, 3, 213, 3, 3)  # of [427, 640, 3]
        small = thirds.mean((1, 3), dtype=np.float32) / 255
        squares.append(small[:, :142])
    split_figures.draw_hilbert(np.stack(squares), path)


def _uploads(rows: Rows) -> Iterable[Mapping]:
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


def _noisy(rows: Rows, method: str, scale: float) -> list[Mapping]:
    """Returns the runs with noise of this scale."""
    seeds = tuple(CONFIG.seeds[: CONFIG.noise.seeds])
    runs = results.select(rows, part="runs", method=method, shots=SHOTS, seed=seeds)
    factor = scale / CONFIG.client.laplace
    return [row for row in runs if abs(row["laplace"] / factor - 1) < 1e-3]


def _swept(rows: Rows, part: str, title: str) -> Lines:
    runs = results.select(rows, part=part)
    lines = []
    for value in sorted({row["value"] for row in runs}):
        accuracy = mean(results.select(runs, value=value))
        lines.append({title: f"{value:g}", "accuracy": accuracy})
    return lines


def _published(paper: Mapping, upload: str) -> str | None:
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


def by_seed(runs: Rows, **coordinates) -> dict[int, float]:
    """Returns the accuracies of the runs with these coordinates by their draws."""
    return {row["seed"]: row["accuracy"] for row in results.select(runs, **coordinates)}


def _gain(runs: Rows, method: str, shots: int) -> str:
    """Returns what Split Adaptation has more on the same draws."""
    ours, theirs = (by_seed(runs, method=name, shots=shots) for name in (SA, method))
    return pages.mean([ours[seed] - theirs[seed] for seed in theirs if seed in ours], "+.1f")


def mean(rows: Rows) -> str:
    """Returns the mean accuracy of rows in percent, with its standard error."""
    return pages.mean(row["accuracy"] for row in rows)


def earlier_tables(found, paper) -> dict:
    """Returns the tables of earlier runs and of the paper's accuracies, which are kept as text."""
    tables = {f"earlier: {name}": rows for name, rows in found.items() if isinstance(rows, list)}
    return tables | {"paper: accuracy": paper["table 1"]}


FLAGS = {"workdir": {"required": True, "type": pathlib.Path, "help": "a finished workdir"}}


def kept_rows(workdir: pathlib.Path) -> Lines:
    """Returns the rows of a finished workdir, without those of costs."""
    if not (workdir / "result.json").exists():
        raise SystemExit(
            f"--workdir must be finished, but {workdir} has no result.json. Run launch.split to "
            "its end."
        )
    rows = []
    for path in sorted(workdir.glob("cells/**/row.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        rows.append(timing.rounded(row, lambda value: float(f"{value:.4g}")))
    return [row for row in rows if row["part"] != "costs"]


def measure(flags) -> dict:
    return {"rows": kept_rows(flags.workdir)}
