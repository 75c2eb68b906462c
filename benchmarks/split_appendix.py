"""What the appendix of Split Adaptation (arXiv:2503.00441) adds, on digits: all attackers, Tables 9
and 10 on the paper's grids, and training until the loss does not decrease.

    python -m launch.split --config configs/split/digits.py:appendix --workdir W
    python -m benchmarks run split_appendix --update --workdir W
    python -m benchmarks.evidence results/split_adaptation.md

The second command keeps the rows of the finished workdir, and the third one writes the page. The
workdir's attackers.png is docs/results/split_attackers.png."""

from benchmarks import pages
from benchmarks.evidence_split import FLAGS, Lines, Rows, by_seed, mean, measure, score
from configs.split import digits
from launch import results

__all__ = ["FLAGS", "measure", "tables"]

CONFIG = digits.get_config("appendix")
PATCHES = 16  # of an image of 8x8 pixels


def tables(found, paper) -> dict:
    """Returns the tables of the run, beside the paper's numbers."""
    rows = found["rows"]
    rows_of = {
        "digits: attackers": _attack_rows(rows),
        "digits: patches": _patch_rows(rows, paper["table 9, replaced of 196 patches"]),
        "digits: epochs": _epoch_rows(rows),
    }
    copies = []
    for number, accuracy in paper["table 10, copies"].items():
        swept = results.select(rows, part="copies", value=int(number))
        line = {"copies": number, "paper": f"{accuracy:.2f}"}
        if swept:
            copies.append(line | {"digits": mean(swept), "draws": str(len(swept))})
    if len(copies) > 1:  # one number compares with nothing
        rows_of["digits: copies"] = copies
    return rows_of


def _attack_rows(rows: Rows) -> Lines:
    lines = []
    for upload in CONFIG.attack.uploads:
        (row,) = results.select(rows, part="attacks", upload=upload)
        for attacker, scores in row["attackers"].items():
            line = {"upload": upload, "attacker": attacker}
            line["PSNR, dB"] = score(scores["psnr"])
            line["SSIM (7)"] = score(scores["ssim_uniform7"])
            lines.append(line)
    return lines


def _patch_rows(rows: Rows, published) -> Lines:
    swept = results.select(rows, part="patches")

    def near(value):
        """Returns the accuracies of a value, which the file rounds, by draw."""
        return by_seed([row for row in swept if abs(row["value"] - value) < 1e-3])

    none = near(0.0)
    lines = []
    for number, accuracy in published.items():
        share = int(number) / 196
        runs = near(share)
        gains = [runs[seed] - none[seed] for seed in runs if seed in none]
        line = {"patches of 196": number, "paper": f"{accuracy:.2f}"}
        line[f"patches of {PATCHES}"] = str(round(share * PATCHES))
        line["digits"] = pages.mean(runs.values())
        lines.append(line | {"less no patch": pages.mean(gains, "+.1f") if share else None})
    return lines


def _epoch_rows(rows: Rows) -> Lines:
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


def _epochs(rows: Rows) -> str:
    ends = sorted({row["epochs"] for row in rows})
    return " to ".join(map(str, ends))
