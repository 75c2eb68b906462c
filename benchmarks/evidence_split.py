"""The claims of Split Adaptation (arXiv:2503.00441) with a public ViT of CIFAR-10 and five classes
of CIFAR-100.

    python -m launch.split --config configs/split/cifar100.py --workdir W --config.attack.lpips ...
    python -m benchmarks run evidence_split --workdir W
    python -m benchmarks.evidence results/split_adaptation.md

The docstring of the config has the whole first command. The second one keeps the rows of the
finished workdir, and the third one writes the page. All images are public benchmarks."""

import argparse
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from configs.split import cifar100
from jaxdp.report import format_table, plot_panels
from launch import results
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
    shots = sorted({row["shots"] for row in runs})
    theirs = {row["method"]: row["5 shots"] for row in paper["table 1"]}
    methods = [name for name in (*BASELINES, SA) if results.select(runs, method=name)]
    ablations = [name for name in ABLATIONS if results.select(runs, method=name)]
    ablated, reference = paper["table 4, 5 shots"], float(theirs[SA].split()[0])
    made: dict[str, list[dict[str, Any]]] = {
        "accuracy": [
            {"method": name}
            | {f"{k} shots": _mean(results.select(runs, method=name, shots=k)) for k in shots}
            for name in methods
        ],
        "differences": [
            {"Split Adaptation less": name}
            | {f"{k} shots": _gain(runs, name, k) for k in shots}
            | {"paper, 5 shots": f"{reference - float(theirs[name].split()[0]):+.2f}"}
            for name in methods
            if name != SA
        ],
        "ablations": [
            {
                "variant": name,
                "accuracy": _mean(results.select(runs, method=name, shots=SHOTS)),
                "Split Adaptation less this": _gain(runs, name, SHOTS) if name != SA else None,
                "paper": f"{ablated[SA] - ablated[PAPER_ROWS[name]]:+.2f}"
                if name in PAPER_ROWS
                else None,
            }
            for name in ablations
        ],
        "rates": [
            {"method": name}
            | {f"rate {row['rate']:g}": results.percent(row["accuracy"]) for row in tried}
            for name in dict.fromkeys(row["method"] for row in results.select(rows, part="tuning"))
            for tried in [
                sorted(
                    results.select(rows, part="tuning", method=name), key=lambda row: row["rate"]
                )
            ]
        ],
        "stealing": [
            {
                "model": name,
                "accuracy": _mean(results.select(runs, method=name, shots=SHOTS)),
                "paper": known,
            }
            for name, known in (
                (name, _shown(paper["table 3"].get(name))) for name in (*STOLEN, SA)
            )
            if results.select(runs, method=name)
        ],
        "reconstruction": [
            {
                "upload": row["upload"],
                "attacker": name,
                "PSNR, dB": _score(scores["psnr"]),
                "SSIM (11)": _score(scores["ssim_gaussian11"]),
                "LPIPS": _score(scores["lpips"]),
                "paper: PSNR, SSIM, LPIPS": _published(paper, row["upload"])
                if name == "noise-aware"
                else None,
            }
            for row in _uploads(rows)
            for name, scores in row["attackers"].items()
        ],
        "noise": [
            {"scale b": f"{scale:g}"}
            | {name: _mean(_noisy(rows, name, scale)) for name in (SA, SA_ONCE)}
            | {f"PSNR, {STRONGEST[name]}": _score(attack[name]["psnr"]) for name in STRONGEST}
            for scale, attack in _attacks(rows).items()
        ],
        "patches": _swept(rows, "patches", "share of replaced patches"),
        "copies": _swept(rows, "copies", "copies"),
        "private mode": [
            {"epsilon": f"{level:g}", "images of a class": str(k), "accuracy": _mean(mine)}
            for (level, k), mine in _private(rows).items()
        ],
    }
    return {name: format_table(lines, style="markdown") for name, lines in made.items() if lines}


def draw(found: Mapping[str, Any], _: Any, path: pathlib.Path) -> None:
    """Draws Figure 4: accuracy against what two attackers reconstruct, a point for each scale of
    the noise."""
    rows = found["rows"]
    accuracy = {scale: results.over_seeds(_noisy(rows, SA, scale)).mean for scale in _attacks(rows)}
    panels = {
        title: (
            title,
            {
                STRONGEST[name]: [
                    (attack[name][score]["mean"], accuracy[k])
                    for k, attack in _attacks(rows).items()
                ]
                for name in reversed(STRONGEST)
            },
        )
        for score, title in (("psnr", "PSNR in dB"), ("ssim_gaussian11", "SSIM"))
    }
    plot_panels(
        path,
        panels,
        title="Accuracy against reconstruction",
        subtitle=f"Laplace noise of {len(accuracy)} scales, {SHOTS} images of each of five "
        "classes. Attackers take one copy, or the median of all.",
        ylabel="accuracy",
        percent=True,
    )


def _uploads(rows: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    named = {row["upload"]: row for row in results.select(rows, part="attacks")}
    yield from (
        named[name]
        for name in (*PAPER_UPLOADS, *sorted({*named} - {*PAPER_UPLOADS}))
        if name in named
    )
    for row in sorted(results.select(rows, part="attacks_private"), key=lambda row: -row["level"]):
        yield {**row, "upload": f"private mode, epsilon {row['level']:g}"}


def _attacks(rows: Sequence[Mapping[str, Any]]) -> dict[float, Any]:
    found = {row["level"]: row["attackers"] for row in results.select(rows, part="attacks_noise")}
    return dict(sorted(found.items()))


def _noisy(rows: Sequence[Mapping[str, Any]], method: str, scale: float) -> list[Mapping[str, Any]]:
    """Returns the runs with noise of this scale."""
    runs = results.select(
        rows,
        part="runs",
        method=method,
        shots=SHOTS,
        seed=tuple(CONFIG.seeds[: CONFIG.noise.seeds]),
    )
    return [row for row in runs if abs(row["laplace"] * CONFIG.client.laplace / scale - 1) < 1e-3]


def _swept(rows: Sequence[Mapping[str, Any]], part: str, title: str) -> list[dict[str, Any]]:
    found = results.select(rows, part=part)
    values = sorted({row["value"] for row in found})
    return [
        {title: f"{value:g}", "accuracy": _mean(results.select(found, value=value))}
        for value in values
    ]


def _private(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[float, int], list[Mapping[str, Any]]]:
    found: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for row in sorted(results.select(rows, part="private"), key=lambda row: row["epsilon"]):
        found.setdefault((round(row["epsilon"], 2), row["shots"]), []).append(row)
    return found


def _published(paper: Mapping[str, Any], upload: str) -> str | None:
    if upload not in PAPER_UPLOADS:
        return None
    table, name = PAPER_UPLOADS[upload]
    ssim, psnr, lpips = paper[table][name]
    return f"{psnr:g}, {ssim:g}, {lpips:g}"


def _shown(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _score(moments: Mapping[str, float]) -> str:
    return f"{moments['mean']:.3g} ({moments['error']:.2g})"


def _gain(runs: Sequence[Mapping[str, Any]], method: str, shots: int) -> str:
    """Returns what Split Adaptation has more on the same draws."""
    ours = {row["seed"]: row["accuracy"] for row in results.select(runs, method=SA, shots=shots)}
    mine = results.select(runs, method=method, shots=shots)
    return _percent(
        [ours[row["seed"]] - row["accuracy"] for row in mine if row["seed"] in ours], "+"
    )


def _mean(rows: Sequence[Mapping[str, Any]]) -> str:
    return _percent([row["accuracy"] for row in rows])


def _percent(values: Sequence[float], sign: str = "") -> str:
    """Returns a mean in percent with its standard error, nothing without values."""
    if not values:
        return ""
    mean, _, error = results.moments(values)
    return f"{100 * mean:{sign}.1f}" + (f" ({100 * error:.1f})" if len(values) > 1 else "")


def earlier_tables(found: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of earlier runs and of the paper's accuracies, which are kept as text."""
    earlier = {
        f"earlier: {name}": format_table(rows, style="markdown")
        for name, rows in found.items()
        if isinstance(rows, list)
    }
    return earlier | {"paper: accuracy": format_table(paper["table 1"], style="markdown")}


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
