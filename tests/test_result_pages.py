"""The numbers on a page of results are those of its JSON files.

A row of PAGES names the JSON files of a page, in benchmarks/results. Every number with a decimal point on the page, in
tables and in prose, must then be in one of them, rounded to the digits that the page shows. A share may be shown in
percent, and a sign is not compared. Numbers of the paper belong into the JSON too. Blocks of code, inline code and the
targets of links are not read. `benchmarks.evidence` writes some tables, and `test_evidence.py` compares them, so they
are not read either. A number of one or two digits may be found by chance, more often in a large file. So commit
summaries rather than rows.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "dpadapter.md": ["dpadapter_usps.json", "dpadapter_paper.json", "dpadapter_cifar.json"],
    "public_checkpoint.md": ["finetune_squeezenet.json"],
}
_WRITTEN = re.compile(r"<!-- \w+ -->.*?<!-- end -->", flags=re.DOTALL)
_SKIPPED = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", flags=re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.:/])\d*\.\d+(?![\w.]\d)")


def numbers(document):
    """Yields the numbers of a JSON document. Texts such as "0.63 ± 0.01" have numbers too."""
    if isinstance(document, dict | list):
        for part in document.values() if isinstance(document, dict) else document:
            yield from numbers(part)
    elif isinstance(document, str):
        yield from map(float, _NUMBER.findall(document))
    elif isinstance(document, int | float):
        yield abs(float(document))


def shown(text):
    """Returns the numbers with a decimal point in a page, outside of the written tables."""
    return _NUMBER.findall(_SKIPPED.sub("", _WRITTEN.sub("", text)))


def untied(text, documents):
    """Returns the numbers of a page that no document has, in order."""
    known = {value * scale for document in documents for value in numbers(document) for scale in (1, 100)}

    def found(number):
        half = 0.5 * 10.0 ** -len(number.partition(".")[2])
        return any(abs(float(number) - value) <= half + 1e-9 for value in known)

    return [number for number in shown(text) if not found(number)]


@pytest.mark.parametrize("page", PAGES)
def test_numbers_of_a_page_are_in_its_files(page):
    text = (ROOT / "docs" / "results" / page).read_text()
    documents = [json.loads((ROOT / "benchmarks" / "results" / name).read_text()) for name in PAGES[page]]
    assert shown(text) and untied(text, documents) == []
    # Twin: many numbers with another last digit are found missing. Otherwise the files tie nothing.
    wrong = _NUMBER.sub(lambda match: match[0][:-1] + str((int(match[0][-1]) + 5) % 10), _SKIPPED.sub("", text))
    assert len(untied(wrong, documents)) > len(shown(text)) / 4


def test_a_number_is_compared_at_the_digits_that_are_shown():
    documents = [{"rows": [{"accuracy": 0.6349}, {"text": "0.712 ± 0.004"}], "paper": -3.5, "runs": 5}]
    text = "| .635 | 63.5 | 63.49 | 71.2 ± .004 | -3.5 | 5 | `0.9` [see](page.md#0.8) arXiv:2010.04925 v1.2.3 |"
    assert untied(text, documents) == []
    for wrong in (".634", "63.6", "63.48", ".0351", "3.6", ".713"):
        assert untied(f"{text} {wrong}", documents) == [wrong]
