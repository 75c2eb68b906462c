"""The tables and numbers of the documentation are those of committed JSON files.

`benchmarks.evidence` writes the tables. Every number with a decimal point in the prose of a page of
results must be in one of its tables, or in one of the files of PROSE, rounded to the digits that
the page shows. A share may be shown in percent. A sign is compared where it is written. Numbers of
a paper belong into a file too. Blocks of code, inline code and the targets of links are not read. A
number of one or two digits may be found by chance, more often in a large file. So the files of
PROSE are small, and a page with a large file has a table of what it states."""

import functools
import re

import pytest

from benchmarks.evidence import DOCS, EVIDENCE, place, read
from configs.split import cifar100, digits
from launch import split

MARK = re.compile(r"<!-- table: ([^\n]+) -->\n.*?<!-- end -->", flags=re.DOTALL)
PROSE = {
    "results/dpadapter.md": ("dpadapter_paper.json", "dpadapter_cifar.json"),
    "results/public_checkpoint.md": ("finetune_squeezenet.json",),
    "results/membership.md": ("membership.json",),
    "results/agt.md": ("agt_paper.json",),
    "results/recalibration.md": ("recalibration_paper.json", "recalibration_network_b.json"),
    "results/split_adaptation.md": ("split_earlier.json", "split_paper.json"),
    "results/tta.md": ("tta_cifar10_earlier.json", "tta_paper.json"),
}
_SKIPPED = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", flags=re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.:/])\d*\.\d+(?![\w.]\d)")
_SIGNED = re.compile(r"(?<![\w.:/])([-+]?)(\d*\.\d+)(?![\w.]\d)")


def text_of(page):
    return (DOCS / page).read_text(encoding="utf-8")


@functools.cache
def tables(page):
    """Returns the tables of all files of a page by name."""
    return {
        name: table
        for one in EVIDENCE
        if one.page == page
        for name, table in one.tables(*read(one.files)).items()
    }


def shifted(found, changed=None):
    """Returns results in which every accuracy, bound, size and difference is another one."""
    if isinstance(found, dict):
        return {k: shifted(v, k) for k, v in found.items()}
    if isinstance(found, list):
        return [shifted(v, changed) for v in found]
    if isinstance(found, str):
        return _NUMBER.sub(lambda match: f"{match[0]}9", found)
    if isinstance(found, int) and found > 1e6:
        return 2 * found
    return (
        1.1 * found + 0.02
        if isinstance(found, float) and changed not in ("epsilon", "upper")
        else found
    )


@pytest.mark.parametrize("one", EVIDENCE, ids=[f"{one.page}:{one.files[0]}" for one in EVIDENCE])
def test_tables_are_those_of_the_files(one):
    text, found = text_of(one.page), read(one.files)
    for name, table in one.tables(*found).items():
        assert place(text, name, table) == text, name
    for name, table in one.tables(*map(shifted, found)).items():
        assert place(text, name, table) != text or not _NUMBER.search(table), name
    assert all((DOCS / one.page).with_name(name).exists() for name in one.pictures)


def test_every_marked_table_has_a_file():
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    marked = {page: sorted(MARK.findall(text_of(page))) for page in pages}
    written = {one.page: sorted(tables(one.page)) for one in EVIDENCE}
    assert {page: names for page, names in marked.items() if names} == written


def numbers(document):
    """Yields the signs and sizes of the numbers of a JSON document. Texts such as "+0.63 ± 0.01"
    have numbers too, with a sign where one is written."""
    if isinstance(document, dict | list):
        for part in document.values() if isinstance(document, dict) else document:
            yield from numbers(part)
    elif isinstance(document, str):
        yield from ((sign, float(size)) for sign, size in _SIGNED.findall(document))
    elif isinstance(document, int | float):
        yield "-" if document < 0 else "+", abs(float(document))


def shown(text):
    """Returns signs and sizes of the numbers with a decimal point in a page, outside of the written
    tables."""
    return _SIGNED.findall(_SKIPPED.sub("", MARK.sub("", text)))


def untied(text, documents):
    """Returns the numbers of a page that no document has, in order."""
    known = [pair for document in documents for pair in numbers(document)]

    def found(sign, size):
        half = 0.5 * 10.0 ** -len(size.partition(".")[2])
        return any(
            abs(float(size) - value * scale) <= half + 1e-9
            for of_value, value in known
            if sign in ("", of_value)
            for scale in (1, 100)
        )

    return [size for sign, size in shown(text) if not found(sign, size)]


@pytest.mark.parametrize("page", PROSE)
def test_numbers_of_sentences_are_in_the_files(page):
    text, documents = text_of(page), [tables(page), *read(PROSE[page])]
    assert shown(text) and untied(text, documents) == []
    assert untied(text + " 98.76", documents) == ["98.76"]


def test_most_wrong_numbers_of_sentences_would_be_found():
    """Otherwise the files tie nothing."""
    found = [(text_of(page), [tables(page), *read(PROSE[page])]) for page in PROSE]

    def wrong(match):
        return match[0][:-1] + str((int(match[0][-1]) + 5) % 10)

    missing = sum(
        len(untied(_NUMBER.sub(wrong, _SKIPPED.sub("", text)), documents))
        for text, documents in found
    )
    assert missing > sum(len(shown(text)) for text, _ in found) / 3


def test_a_number_is_compared_at_the_digits_that_are_shown():
    documents = [
        {"rows": [{"accuracy": 0.6349}, {"text": "0.712 ± 0.004"}], "paper": -3.5, "runs": 5}
    ]
    text = "| .635 | 63.5 | 63.49 | 71.2 ± .004 | -3.5 | 5 | `0.9` [see](page.md#0.8) "
    text += "arXiv:2010.04925 v1.2.3 |"
    assert untied(text, documents) == []
    for wrong in (".634", "63.6", "63.48", ".0351", "3.6", ".713"):
        assert untied(f"{text} {wrong}", documents) == [wrong]
    assert untied("-3.5 +.635", documents) == [] and untied("+3.5 -.635", documents) == [
        "3.5",
        ".635",
    ]


def test_all_bounds_of_programs_are_sound():
    programs = read(("intervals.json",))[0]["programs"]
    assert len(programs) >= 40
    assert all(
        one.get("sound", "refused" in one) for found in programs.values() for one in found.values()
    )


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("split_cifar100.json", cifar100.get_config()),
        ("split_appendix.json", digits.get_config("appendix")),
    ],
)
def test_the_runs_of_split_adaptation_are_those_of_the_config(file, config):
    cells = [cell for cell in split.STUDY.cells(config) if cell.part != "costs"]
    fields = {cell.part: cell._fields for cell in cells}

    def named(row):
        return [
            f"{row[k]:.4g}" if isinstance(row[k], float) else str(row[k])
            for k in fields[row["part"]]
        ]

    rows = read((file,))[0]["rows"]
    configured = {tuple(named(cell._asdict())) for cell in cells}
    assert sorted(map(named, rows)) == sorted(map(list, configured))
