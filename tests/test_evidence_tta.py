"""docs/results/tta.md has the tables of benchmarks/results/evidence_tta.json, and its sentences the signs of it."""

import copy
import json
import math

import pytest

from benchmarks import evidence_tta
from configs.tta import usps_shift
from tests.test_result_pages import untied

FOUND = json.loads(evidence_tta.RESULTS.read_text())
PAGE = evidence_tta.PAGE.read_text()


def test_the_tables_are_those_of_the_runs():
    made = evidence_tta.tables(FOUND)
    assert [name for name, table in made.items() if f"<!-- table: {name} -->\n\n{table}\n" not in PAGE] == []
    assert evidence_tta.filled(PAGE, made) == PAGE
    other = copy.deepcopy(FOUND)
    other["continual"]["cells"][0]["over_source"][0] += 0.01
    assert evidence_tta.filled(PAGE, evidence_tta.tables(other)) != PAGE


@pytest.mark.parametrize("protocol", FOUND)
def test_the_runs_are_those_of_the_config(protocol):
    config, found = usps_shift.get_config(protocol), FOUND[protocol]
    assert found["source models"] == config.protocol.sources
    assert found["streams"] * found["source models"] == config.protocol.seeds
    assert found["images per domain"] == config.data.images and {*found["domains"]} == {*config.data.corruptions}
    settings = {cell["setting"] for cell in found["cells"] if cell["method"] == "Tent"}
    assert settings == {"original", "clipped", *(f"epsilon {budget:g}" for budget in config.privacy.budgets)}
    for cell in found["cells"]:
        assert all(math.isfinite(number) for number in (*cell["over_source"], *cell["over_original"]))


def test_numbers_of_sentences_are_in_the_files():
    prose = PAGE
    for table in evidence_tta.tables(FOUND).values():
        prose = prose.replace(table, "")
    names = ("evidence_tta.json", "tta_cifar10_earlier.json", "tta_paper.json")
    documents = [json.loads(evidence_tta.RESULTS.with_name(name).read_text()) for name in names]
    assert len(prose) < 0.8 * len(PAGE) and untied(prose, documents) == []
    assert untied(prose.replace("+4.9 ± 3.5", "+9.9 ± 3.5"), documents)
