"""What the appendix of Split Adaptation (arXiv:2503.00441) adds, on digits: all attackers, Tables 9
and 10 on the paper's grids, and training until the loss does not decrease.

    python -m launch.split --config configs/split/digits.py:appendix --workdir W
    python -m benchmarks run split_appendix --update --workdir W
    python -m benchmarks.evidence results/split_adaptation.md

The second command keeps the rows of the finished workdir, and the third one writes the page. The
workdir's attackers.png is docs/results/split_attackers.png."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.evidence_split import add_arguments, mean, measure, percent, score
from configs.split import digits
from jaxdp.report import format_table
from launch import results

__all__ = ["add_arguments", "measure", "tables"]

CONFIG = digits.get_config("appendix")
PATCHES = 16  # of an image of 8x8 pixels
Lines = list[dict[str, Any]]


def tables(found: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of the run, beside the paper's numbers."""
    rows = found["rows"]
    rows_of = {
        "digits: attackers": _attack_rows(rows),
        "digits: patches": _patch_rows(rows, paper["table 9, replaced of 196 patches"]),
        "digits: epochs": _epoch_rows(rows),
    }
    copies = _copy_rows(rows, paper["table 10, copies"])
    if len(copies) > 1:  # one number compares with nothing
        rows_of["digits: copies"] = copies
    return {name: format_table(lines, style="markdown") for name, lines in rows_of.items()}


def _attack_rows(rows: Sequence[Mapping[str, Any]]) -> Lines:
    lines = []
    for upload in CONFIG.attack.uploads:
        (row,) = results.select(rows, part="attacks", upload=upload)
        for attacker, scores in row["attackers"].items():
            line = {"upload": upload, "attacker": attacker}
            line["PSNR, dB"] = score(scores["psnr"])
            line["SSIM (7)"] = score(scores["ssim_uniform7"])
            lines.append(line)
    return lines


def _patch_rows(rows: Sequence[Mapping[str, Any]], published: Mapping[str, float]) -> Lines:
    swept = results.select(rows, part="patches")
    none = {row["seed"]: row["accuracy"] for row in _near(swept, 0.0)}
    lines = []
    for number, accuracy in published.items():
        share = int(number) / 196
        runs = _near(swept, share)
        gains = [row["accuracy"] - none[row["seed"]] for row in runs if row["seed"] in none]
        line = {"patches of 196": number, "paper": f"{accuracy:.2f}"}
        line[f"patches of {PATCHES}"] = str(round(share * PATCHES))
        line["digits"] = mean(runs)
        lines.append(line | {"less no patch": percent(gains, "+") if share else None})
    return lines


def _copy_rows(rows: Sequence[Mapping[str, Any]], published: Mapping[str, float]) -> Lines:
    lines = []
    for number, accuracy in published.items():
        swept = results.select(rows, part="copies", value=int(number))
        line = {"copies": number, "paper": f"{accuracy:.2f}"}
        if swept:
            lines.append(line | {"digits": mean(swept), "draws": str(len(swept))})
    return lines


def _near(rows: Sequence[Mapping[str, Any]], value: float) -> Sequence[Mapping[str, Any]]:
    """Returns the rows of a value, which the file rounds."""
    return [row for row in rows if abs(row["value"] - value) < 1e-3]


def _epoch_rows(rows: Sequence[Mapping[str, Any]]) -> Lines:
    """Returns a line for each method that was trained by the rule, over the draws of the rule."""
    lines = []
    for method in CONFIG.methods:
        ruled = results.select(rows, part="rule", method=method)
        seeds = tuple(row["seed"] for row in ruled)
        fixed = results.select(rows, part="runs", method=method, laplace=1.0, seed=seeds)
        if ruled:
            line = {"method": method, "epochs": _epochs(fixed), "accuracy": mean(fixed)}
            line["epochs by the rule"] = _epochs(ruled)
            lines.append(line | {"accuracy by the rule": mean(ruled)})
    return lines


def _epochs(rows: Sequence[Mapping[str, Any]]) -> str:
    ends = sorted({row["epochs"] for row in rows})
    return " to ".join(map(str, ends))
