"""The pages of results have the tables and numbers of the committed runs."""

import copy
import json
import re
from pathlib import Path

import pytest

from benchmarks import bench_intervals, evidence_agt, evidence_recalibration
from benchmarks.evidence import ROOT, TABLES, place

RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> str:
    return (ROOT / "docs" / "results" / name).read_text(encoding="utf-8")


def test_the_page_of_private_prediction_has_the_tables_of_its_runs():
    report, page = json.loads(evidence_agt.RESULTS.read_text()), read("agt.md")
    assert all(table in page for table in evidence_agt.tables(report).values())
    other = copy.deepcopy(report)
    other["data"]["SST-2"]["draws"][0]["DP-SGD"] -= 0.1
    assert not all(table in page for table in evidence_agt.tables(other).values())


def test_prose_about_private_prediction_has_numbers_of_its_tables():
    report, page = json.loads(evidence_agt.RESULTS.read_text()), read("agt.md")
    known = set(re.findall(r"\d+\.\d", " ".join(evidence_agt.tables(report).values())))
    known |= {f"{paper:.1f}" for paper in (82.8, 12.7, 54.4, 99.8, 18.7, 73.5, 81.2, 70.5, 45.8, 54.2)}
    verdict = page[page.index("## Verdict") : page.index("At (10, 1e-5)")]
    stated = set(re.findall(r"\b\d+\.\d\b", verdict)) - {"4.6"}  # Theorem 4.6
    assert stated and stated <= known


def test_certificates_on_the_page_are_those_of_their_run():
    page, cases = read("agt.md"), json.loads((RESULTS / "certificates_cpu.json").read_text())["cases"]
    for name, runs in cases.items():
        mean = {rule: sum(run[rule] for run in runs) / len(runs) for rule in ("published", "replace", "add_remove")}
        cells = [rf"{value:.1f} \(\d\.\d\)" for value in mean.values()]
        gain = f"{mean['add_remove'] / mean['published']:.1f}"
        assert re.search(" \\| ".join([re.escape(f"| {name}"), *cells, gain]), page), name


def test_the_page_of_intervals_is_that_of_its_run_and_all_its_bounds_are_sound():
    report = json.loads(bench_intervals.RESULTS.read_text())
    assert read("intervals.md") == bench_intervals.page(report)
    found = [one for program in report["programs"].values() for one in program.values()]
    assert len(report["programs"]) >= 40 and all(one.get("sound", "refused" in one) for one in found)


def test_the_page_of_recalibration_has_the_tables_of_its_runs():
    report, page = json.loads(evidence_recalibration.RESULTS.read_text()), read("recalibration.md")
    tables = evidence_recalibration.tables(report)
    assert all(table in page for table in tables.values())
    verdict = page[page.index("## Verdict") : page.index("## Further findings")]
    stated = set(re.findall(r"\b0\.\d{3}\b", verdict))
    assert stated and stated <= set(re.findall(r"\b0\.\d{3}\b", " ".join(tables.values())))
    report["resnet20"]["methods"]["Acc-T wide"]["centre"][0][0] += 0.1
    assert not all(table in page for table in evidence_recalibration.tables(report).values())


def shifted(found, changed=None):
    """Returns results in which every accuracy, bound and size is higher: no table may stay as it is."""
    if isinstance(found, dict):
        return {k: shifted(v, k) for k, v in found.items()}
    if isinstance(found, list):
        return [shifted(v, changed) for v in found]
    if isinstance(found, int) and found > 1e6:
        return 2 * found
    return found + 0.02 if isinstance(found, float) and changed not in ("epsilon", "upper") else found


@pytest.mark.parametrize(("page", "name", "file", "make"), TABLES, ids=[name for _, name, _, _ in TABLES])
def test_a_table_is_that_of_the_runs(page, name, file, make):
    text = Path(ROOT / "docs" / "results" / page).read_text(encoding="utf-8")
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    assert place(text, name, make(found)) == text
    assert place(text, name, make(shifted(found))) != text
