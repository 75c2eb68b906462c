"""Tables of result pages from committed JSON files: `python -m benchmarks.evidence` writes them into the pages.

A table stands between the lines `<!-- NAME -->` and `<!-- end -->` of a page. `tests/test_evidence.py` compares.
"""

import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import finetune_methods, membership, split_costs, split_private
from launch import results

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLACE = r"(?<=<!-- {} -->\n\n).*?(?=\n\n<!-- end -->)"


def curve(found: Mapping[str, Any]) -> str:
    """Returns accuracies over epsilon, a row for each set of private images."""
    epsilons = sorted({point["epsilon"] for run in found["runs"].values() for point in run["points"]})
    lines = [f"| private images | runs |{''.join(f' epsilon {e:g} |' for e in epsilons)} no privacy |"]
    lines.append("|---|---|" + "---|" * (len(epsilons) + 1))
    for name, run in found["runs"].items():
        at = {point["epsilon"]: results.percent(point["accuracy"], point["deviation"]) for point in run["points"]}
        plain = "" if run["without_privacy"] is None else results.percent(run["without_privacy"])
        cells = [f"{run['records']} of {name.removesuffix('_full')}", str(run["runs"])]
        lines.append("| " + " | ".join([*cells, *(at.get(e, "") for e in epsilons), plain]) + " |")
    return "\n".join(lines)


# Page, name of the table, JSON file, and what makes the table of it.
TABLES: list[tuple[str, str, str, Callable[[Any], str]]] = [
    ("scattering.md", "curve", "finetune_scattering.json", curve),
    ("public_checkpoint.md", "methods", "finetune_methods.json", lambda found: finetune_methods.table(found["rows"])),
    ("membership.md", "membership", "membership.json", lambda found: membership.table(found["rows"])),
    ("membership.md", "lira", "membership.json", lambda found: membership.lira_table(found["rows"])),
    ("split_adaptation.md", "private", "split_private.json", split_private.table),
    ("split_adaptation.md", "costs", "split_costs.json", split_costs.table),
]


def place(page: str, name: str, table: str) -> str:
    """Returns the page with the table in its place."""
    found, count = re.subn(PLACE.format(name), lambda _: table, page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page must have one place {name!r}, got {count}.")
    return found


def main() -> None:
    for page, name, file, make in TABLES:
        path = ROOT / "docs" / "results" / page
        found = json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))
        path.write_text(place(path.read_text(encoding="utf-8"), name, make(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
