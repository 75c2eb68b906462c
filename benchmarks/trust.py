"""How far the estimate of a compiler can be trusted: its ranks beside those of the times on a
device.

Both reports may have other batches, so an example is what they share. A time includes the update
where the estimate has none of it."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy import stats

from jaxdp.report import format_table

Row = dict[str, Any]
LEAST = 3  # pairs, below which ranks say nothing


class Case(NamedTuple):
    """A case of `benchmarks.compiled`, and the examples of its batch."""

    name: str
    examples: int


# By the names of `benchmarks.device`.
CASES = {
    "ViT-B/16, bfloat16": Case("ViT-B/16, bfloat16, 256", 256),
    "wrn_16_4": Case("WRN-16-4, float32, 256", 256),
    "GPT-2 small, full, bfloat16": Case("GPT-2 small, full, bfloat16, 8 x 512", 8),
    "GPT-2 small, lora, bfloat16": Case("GPT-2 small, LoRA, bfloat16, 8 x 512", 8),
    "Tent, base ViT": Case("tent on ViT-B/16, float32, 64", 64),
}
# The steps of `benchmarks.compiled` by those of `benchmarks.device`, the closest one first.
STEPS = {
    "plain": ("plain step", "plain"),
    "clipped": ("clipped",),
    "private": ("private step", "private"),
    "jax_privacy": ("jax_privacy",),
}


def rank_correlation(times: Sequence[float], estimates: Sequence[float]) -> float:
    """Returns Spearman's rank correlation, [-1, 1]. It is NaN for fewer than `LEAST` pairs, or if
    one side is constant.

    Raises:
      ValueError: The lengths differ.
    """
    if len(times) != len(estimates):
        raise ValueError(
            f"times and estimates must have one length, got {len(times)} and {len(estimates)}."
        )
    if len(times) < LEAST or len(set(times)) == 1 or len(set(estimates)) == 1:
        return math.nan
    return float(stats.spearmanr(times, estimates).statistic)


def pairs(times: Mapping, estimates: Mapping[str, Mapping[str, Row]]) -> list[Row]:
    """Returns a row for each step that both have, with its time and its estimate of an example.

    Args:
      times: The cases of a report of `benchmarks.device`.
      estimates: By case, the rows of steps with a "total", as `benchmarks.compiled.with_ratios`
          returns them.
    """
    rows = []
    for name, measured in times.items():
        case = CASES.get(name)
        if case is None or case.name not in estimates:
            continue
        steps = estimates[case.name]
        bases = {}
        for step, names in STEPS.items():
            estimated = [steps[other] for other in names if "total" in steps.get(other, {})]
            timed = measured["steps"].get(step, {})
            if not estimated or "ms" not in timed:
                continue
            row = {"case": case.name, "step": step}
            row["ms"] = timed["ms"] / measured["examples"]
            row["estimate"] = estimated[0]["total"] / case.examples
            bases = row if step == "plain" else bases
            if bases and step != "plain":
                row["ms over plain"] = row["ms"] / bases["ms"]
                row["estimate over plain"] = row["estimate"] / bases["estimate"]
            rows.append(row)
    return rows


def correlations(rows: Sequence[Row]) -> Row:
    """Returns the rank correlations over steps, of an example and of what is over the plain
    step."""

    def agreement(rows, of=""):
        times = [row[f"ms{of}"] for row in rows]
        return rank_correlation(times, [row[f"estimate{of}"] for row in rows])

    ratios = [row for row in rows if "ms over plain" in row]
    return {
        "pairs": len(rows),
        "an example": agreement(rows),
        "ratios": len(ratios),
        "over plain": agreement(ratios, " over plain"),
    }


def text(path: str, estimates: Mapping[str, Mapping[str, Row]]) -> str:
    """Returns the times of a report of `benchmarks.device` beside estimates, and how their ranks
    agree."""
    report = json.loads(pathlib.Path(path).read_text())
    rows = pairs(report["cases"], estimates)
    if not rows:
        return f"{path} has no step that is estimated."
    agree = correlations(rows)
    whole, ratios = _shown(agree["an example"]), _shown(agree["over plain"])
    lines = [
        f"Times on {report['device']} beside the estimates, for one example:",
        format_table(rows, digits=3),
        f"Spearman's rank correlation of times and estimates: {whole} over {agree['pairs']} steps.",
        f"Of the ratios over the plain step: {ratios} over {agree['ratios']}.",
        "This is how far to trust the estimate.",
    ]
    return "\n".join(lines)


def _shown(correlation: float) -> str:
    return "not defined" if math.isnan(correlation) else f"{correlation:.2f}"
