"""The claims of arXiv:2606.01908 on USPS under shift: clipping, conversion cost, and budgets of five methods.

    python -m benchmarks.evidence_tta --data_dir DIR [--workdir workdir/evidence_tta]
    python -m benchmarks.evidence_tta --page    # only the tables and the picture, from the committed results

It runs configs/tta/usps_shift.py, continual and episodic, and keeps what docs/results/tta.md states. An interrupted run
goes on from its workdir. Update lengths and shares of images are functions of the records: for public benchmarks only.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from configs.tta import usps_shift
from jaxdp.files import write_json
from jaxdp.report import format_table, plot_curves
from launch import adapt, frame, results

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "evidence_tta.json", ROOT / "docs" / "results" / "tta.md"
KEPT = ("method", "setting", "mean", "std", "over_source", "over_original", "length", "taken", "learning_rate")
PROTOCOLS = ("continual", "episodic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default="")
    parser.add_argument("--workdir", default="workdir/evidence_tta")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if not options.page:
        for protocol in PROTOCOLS:
            found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            write_json(RESULTS, found | {protocol: run(protocol, options.data_dir, pathlib.Path(options.workdir))})
    found = json.loads(RESULTS.read_text())
    write_page(found)
    draw(found, PAGE.with_suffix(".png"))


def run(protocol: str, data_dir: str, root: pathlib.Path) -> dict[str, Any]:
    """Returns what is kept of the study under a protocol."""
    config = usps_shift.get_config(protocol)
    config.data.data_dir = data_dir
    start = time.process_time()
    result = frame.run(adapt.STUDY, config, root / protocol)
    rows = [json.loads(line) for line in (root / protocol / "rows.jsonl").read_text().splitlines()]
    return summary(result, rows, config, (time.process_time() - start) / 60)


def summary(result: Any, rows: Sequence[Any], config: Any, minutes: float) -> dict[str, Any]:
    """Returns the numbers of a finished study that the page can state."""
    runs = {(r["method"], r["setting"], r["seed"]): r["mean"] for r in rows if r["part"] == "runs"}
    seeds = range(config.protocol.seeds)

    def gaps(method: str, setting: str, over: tuple[str, str]) -> dict[int, float]:
        return {seed: runs[method, setting, seed] - runs[*over, seed] for seed in seeds}

    cells = [{name: cell[name] for name in KEPT if name in cell} for cell in result["cells"]]
    for cell in cells:
        less = gaps(cell["method"], cell["setting"], (cell["method"], adapt.ORIGINAL))
        cell["higher"] = sum(gap > 0 for gap in less.values())
    of_five = {}
    for setting in adapt.settings(config):
        mine = [gaps(method, setting, (adapt.SOURCE, adapt.ORIGINAL)) for method in config.methods]
        means = {seed: results.moments(gap[seed] for gap in mine).mean for seed in seeds}
        of_five[setting] = adapt.crossed(means, config.protocol.sources)
    tried = [{name: row[name] for name in ("method", "setting", "length", "accuracy")} for row in result["tried"]]
    sources = config.protocol.sources
    return {
        "source models": sources,
        "streams": result["seeds"] // sources,
        "images per domain": result["images"],
        "cpu minutes": round(minutes, 1),
        "cells": cells,
        "mean gain of the methods": of_five,
        "tried": tried,
        "domains": {name: value for name, value in result["cells"][-1]["per_corruption"].items()},
    }


# --- The page ---------------------------------------------------------------------------------------------------------


def tables(found: Any) -> dict[str, str]:
    """Returns the tables of the page in Markdown, by the name in their comment."""
    made = {}
    for protocol in (name for name in PROTOCOLS if name in found):
        *cells, source = found[protocol]["cells"]
        changed = [cell for cell in cells if cell["setting"] != adapt.ORIGINAL]
        runs = found[protocol]["streams"] * found[protocol]["source models"]
        made[f"{protocol}: accuracy"] = _pivot([*cells, source], lambda c: f"{100 * c['mean']:.1f}")
        five = [
            {"method": "mean of the five", "setting": setting, "over_source": gain}
            for setting, gain in found[protocol]["mean gain of the methods"].items()
        ]
        made[f"{protocol}: gain"] = _pivot([*cells, *five], lambda c: results.percent(*c["over_source"], sign="+"))
        made[f"{protocol}: change"] = _pivot(
            changed, lambda c, n=runs: f"{results.percent(*c['over_original'], sign='+')} ({c['higher']} of {n})"
        )
        made[f"{protocol}: length"] = _pivot(cells, lambda c: f"{c['length']:.3f}")
        made[f"{protocol}: taken"] = _pivot(
            [cell for cell in cells if "taken" in cell], lambda c: f"{100 * c['taken']:.0f}"
        )
        made[f"{protocol}: by length"] = _by_length(found[protocol]["tried"])
    return made


def _pivot(cells: Sequence[Any], text: Any) -> str:
    return format_table(results.pivot(cells, "method", "setting", lambda c: text(c[0])), style="markdown")


def _by_length(tried: Sequence[Any]) -> str:
    """Returns accuracy on the tuning stream with the length of an update, one column per learning rate."""
    rows = []
    for method in dict.fromkeys(row["method"] for row in tried):
        for setting in (adapt.ORIGINAL, adapt.CLIPPED):
            mine = results.select(tried, method=method, setting=setting)
            shown = {f"rate {k}": f"{100 * r['accuracy']:.1f} at {r['length']:.3f}" for k, r in enumerate(mine, 1)}
            rows.append({"method": method, "setting": setting} | shown)
    return format_table(rows, style="markdown")


def write_page(found: Any) -> None:
    """Replaces the tables of the page."""
    PAGE.write_text(filled(PAGE.read_text(), tables(found)))


def filled(text: str, made: dict[str, str]) -> str:
    """Returns a page with the table of each comment `<!-- table: name -->` in place of the one that follows it."""
    for name, table in made.items():
        mark = f"<!-- table: {name} -->\n"
        if mark in text:
            before, _, after = text.partition(mark)
            rest = after.lstrip("\n").split("\n")
            while rest and rest[0].startswith("|"):
                rest.pop(0)
            text = f"{before}{mark}\n{table}\n\n" + "\n".join(rest).lstrip("\n")
    return text


def draw(found: Any, path: pathlib.Path) -> None:
    """Draws what each private form gains over no adaptation, by epsilon."""
    *cells, source = found["continual"]["cells"]
    noisy = [(float(c["setting"].removeprefix("epsilon ")), c) for c in cells if c["setting"].startswith("epsilon")]
    curves = {
        method: sorted((epsilon, c["mean"]) for epsilon, c in noisy if c["method"] == method)
        for method in dict.fromkeys(c["method"] for c in cells)
    }
    plot_curves(
        path,
        curves,
        title="Accuracy under shift by ε of a sample, USPS, continual",
        subtitle=f"{found['continual']['streams']} streams of 5 domains, {found['continual']['source models']} sources",
        xlabel="ε of one visit (log scale)",
        ylabel="mean accuracy over the stream",
        xscale="log",
        xticks={epsilon: f"{epsilon:g}" for epsilon, _ in noisy},
        references={adapt.SOURCE: source["mean"]},
    )


if __name__ == "__main__":
    main()
