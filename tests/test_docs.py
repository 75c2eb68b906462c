"""The site: it builds strictly, its Python runs, its names exist, and the reference has every name.
`tests/launch/test_commands.py` runs its commands."""

import html
import importlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path
from unittest.mock import patch

import jax_privacy
import pytest

import jaxdp
from jaxdp.transforms.clip_rules import CLIP_RULES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
HOWTO = sorted((DOCS / "howto").glob("*.md"))
TEXTS = [ROOT / "README.md", *(page for page in PAGES if page.parent.name != "reference")]
RUNNING = [
    page for folder in ("howto", "tutorials") for page in sorted((DOCS / folder).glob("*.md"))
]
RUNNING = [page for page in RUNNING if "```python\n" in page.read_text()]


def title(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, language):
    return list(
        re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING, ids=title)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    for rows in page.parent.glob("*_rows.jsonl"):  # what a reader has from the commands of the page
        shutil.copy(rows, tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    text = page.read_text()
    with patch.dict(CLIP_RULES), patch.dict(jaxdp.tta.METHODS):
        for block in blocks(page, "python"):
            # An error shows the line number of the page.
            exec(
                compile("\n" * text.count("\n", 0, block.start(1)) + block[1], page, "exec"), names
            )
    printed = capsys.readouterr().out
    assert printed
    if page in HOWTO:  # what a how-to shows is what it prints
        assert all(block[1] in printed for block in blocks(page, "text"))


@pytest.mark.parametrize("page", HOWTO, ids=title)
def test_a_howto_has_one_short_block_and_says_what_is_guaranteed(page):
    if page.stem == "index":
        return
    assert headings(page)[1:] == ["What is guaranteed", "Where to go next"]
    assert f"]({page.name})" in (DOCS / "howto" / "index.md").read_text()
    lengths = [statements(block[1]) for block in blocks(page, "python")]
    assert len(lengths) <= 1 and all(10 <= length <= 35 for length in lengths)


def statements(code):
    """Returns the number of logical lines. Comments and the columns of a line do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return sum(token.type == tokenize.NEWLINE for token in tokens)


def prose(page):
    """Returns a page without its blocks of code."""
    return re.sub("```.*?```", "", page.read_text(), flags=re.DOTALL)


def headings(page):
    return re.findall("^#+ (.*)", prose(page), flags=re.MULTILINE)


# --- The built site -----------------------------------------------------------------------------


# Without what takes half of the time: looking for garbage, running ruff for each signature, and
# filling the index of the search, at which no test looks.
BUILD = """
import gc, sys
gc.disable()
sys.modules |= dict.fromkeys(["black", "ruff"])
import mkdocs.__main__
from material.plugins.search.plugin import SearchIndex
SearchIndex.add_entry_from_context = lambda self, page: None
mkdocs.__main__.cli()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds the site. A page outside of the navigation, or a link or an anchor that leads nowhere,
    fails the build."""
    pytest.importorskip("mkdocs", reason="the dependency group docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    # The pytest of a checkout may find packages by options that another process does not have.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "NO_MKDOCS_2_WARNING": "1",
    }
    command = [sys.executable, "-c", BUILD, "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    packages = [
        "files",
        *(name for name in jaxdp.__all__ if hasattr(getattr(jaxdp, name), "__path__")),
    ]
    for package in packages:
        page = (site / "reference" / f"{package}.html").read_text()
        found = set(re.findall(r"jaxdp(?:\.\w+)*\.(\w+)", page)) | set(
            re.findall(r"<code>(\w+)</code>", page)
        )
        modules = [f"jaxdp.{package}"]
        if package == "transforms":  # its names are in its modules
            modules += [
                f"jaxdp.transforms.{module}"
                for module in ("clipping", "model_check", "intervals", "noise", "losses")
            ]
        for module in map(importlib.import_module, modules):
            missing = [name for name in getattr(module, "__all__", ()) if name not in found]
            assert not missing, f"docs/reference/{package}.md lacks {missing} of {module.__name__}"
    index = (site / "reference" / "index.html").read_text()
    assert not [
        name for name in jaxdp.__all__ if not name.startswith("_") and f"jaxdp.{name}" not in index
    ]


@pytest.mark.slow
def test_a_reader_needs_no_network(site):
    loaded = r"""<(?:script|img|iframe)[^>]*\bsrc=["']?(?:https?:)?//"""
    loaded += r"""|<link[^>]*\bhref=["']?(?:https?:)?//"""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    assert not [page.name for page in pages if re.search(loaded, page.read_text())]


@pytest.mark.slow
def test_docstrings_are_rendered(site):
    page = html.unescape((site / "reference" / "transforms.html").read_text())
    assert 'id="jaxdp.transforms.clipping.clipped_grad"' in page and "Formal guarantees" in page


# --- Names in the text -------------------------------------------------------------


def exists(name):
    """Tells whether a dotted name is a module, or an attribute or a field in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for i, part in enumerate(parts[cut:], cut + 1):
            if not hasattr(found, part):
                return i == len(parts) and part in getattr(found, "__annotations__", {})
            found = getattr(found, part)
        return True
    return False


def mentioned(package, pages):
    quoted = [(page, code) for page in pages for code in re.findall("`([^`\n]+)`", prose(page))]
    return {
        (title(page), name)
        for page, code in quoted
        for name in re.findall(rf"\b{package}(?:\.\w+)+", code)
    }


def test_names_in_the_text_exist():
    assert exists("jaxdp.models.Pretrained.constants") and exists("jaxdp.audit.multi_run")
    assert (
        not exists("jaxdp.audit.no")
        and not exists("jaxdp.models.Pretrained.no")
        and not exists("jaxdp.no")
    )
    names = {
        (page, name)
        for page, name in mentioned("jaxdp", TEXTS)
        if not name.startswith("jaxdp.launch")
    }
    assert len(names) > 60
    assert not [(page, name) for page, name in sorted(names) if not exists(name)]
    programs = mentioned("launch", TEXTS)
    assert len(programs) > 5
    assert not [
        (page, name) for page, name in sorted(programs) if importlib.util.find_spec(name) is None
    ]


NUMBER = r"\d*\.?\d+"


def sections(page):
    """Returns the text under each heading by the anchor of the heading."""
    parts = re.split("^#+ (.*)\n", page.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-"): text
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def unfounded(cell, folder):
    """Returns the numbers of a cell that are not in the sections to which the cell links."""
    links = re.findall(r"\[([^]]*)\]\(([\w.]+)#([\w-]+)\)", cell)
    rest = re.sub(r"\[[^]]*\]\([^)]*\)", "", cell)
    if cell == "not run":
        return []
    assert links, f"{cell!r} has neither a link nor 'not run'"
    given = [
        (number, sections(folder / page)[anchor])
        for text, page, anchor in links
        for number in re.findall(NUMBER, text)
    ]
    return [
        number for number, text in given if number not in re.findall(NUMBER, text)
    ] + re.findall(NUMBER, rest)


def test_our_numbers_in_the_tables_of_the_papers_are_those_of_the_results():
    page = DOCS / "results" / "paper_tables.md"
    assert unfounded("[.999](dpadapter.md#accuracy-beside-the-paper)", page.parent)
    assert unfounded("[.677](dpadapter.md#accuracy-beside-the-paper), .677", page.parent)
    papers = {name: text for name, text in sections(page).items() if "| ours |" in text}
    lines = "\n".join(papers.values()).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if "`python -m" in line]
    assert len(papers) == 6 and len(rows) > 30 and {len(row) for row in rows} == {6}
    assert sum(row[-1] == "not run" for row in rows) > 10
    assert not [(row[0], bad) for row in rows if (bad := unfounded(row[-1], page.parent))]


def test_files_in_the_text_exist():
    named = {
        (title(page), path)
        for page in TEXTS
        for path in re.findall(
            r"`((?:configs|launch|tests|jaxdp|benchmarks)/[\w/]+\.\w+)[`:]", page.read_text()
        )
    }
    assert len(named) > 10
    made_up = {"launch/x.py", "jaxdp/tta/x.py", "jaxdp/finetune/x.py"}  # files that a reader adds
    assert not [
        (page, path)
        for page, path in sorted(named)
        if path not in made_up and not (ROOT / path).is_file()
    ]


def test_tests_that_repeat_a_finding_exist():
    """A finding without its test would be a claim."""
    page = DOCS / "design" / "threat_model.md"
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    missing = [
        (path, name) for path, name in named if f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert len(named) > 50 and not missing


@pytest.mark.slow
def test_names_of_jax_privacy_in_the_migration_table_exist():
    page = DOCS / "migration.md"
    [version] = re.findall(r"jax_privacy (\d[\d.]*\d)", page.read_text())
    if jax_privacy.__version__ != version:
        pytest.skip(
            f"the table is about jax_privacy {version}, {jax_privacy.__version__} is installed"
        )
    names = mentioned("jax_privacy", [page])
    assert len(names) > 10
    # Its Keras interface needs Keras.
    assert not [name for _, name in sorted(names) if "keras" not in name and not exists(name)]
