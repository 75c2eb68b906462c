"""Pages of docs/: their Python runs, their links and names exist, and the reference is what the docstrings say."""

import importlib.util
import re
import runpy
from pathlib import Path
from unittest import mock

import jax_privacy
import pytest

from jaxdp import tta
from jaxdp.transforms.clipping import CLIP_RULES

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
HOWTO = sorted((DOCS / "howto").glob("*.md"))

pytestmark = pytest.mark.usefixtures("quick_compilation")


def title(page):
    return page.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("page", HOWTO, ids=title)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    text = page.read_text()
    [block] = re.finditer(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert 10 <= sum(bool(line.strip()) for line in block[1].splitlines()) <= 30
    monkeypatch.chdir(tmp_path)
    # Lines of errors are those of the page.
    code = compile("\n" * text.count("\n", 0, block.start(1)) + block[1], page, "exec")
    # A page may register a rule or a method. Other tests must not see it.
    with mock.patch.dict(CLIP_RULES), mock.patch.dict(tta.METHODS):
        exec(code, {"__name__": page.stem})
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", HOWTO, ids=title)
def test_a_page_says_what_is_guaranteed_and_is_in_the_index(page):
    assert headings(page)[1:] == ["What is guaranteed", "Where to go next"]
    assert f"]({title(page)})" in (DOCS / "index.md").read_text()


def prose(page):
    """A page without its blocks of code."""
    return re.sub("```.*?```", "", page.read_text(), flags=re.DOTALL)


def headings(page):
    return re.findall("^#+ (.*)", prose(page), flags=re.MULTILINE)


def slugs(page):
    """Anchors of the headings of a page, as GitHub makes them."""
    found: list[str] = []
    for heading in headings(page):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        repeated = sum(slug == re.sub(r"-\d+$", "", other) for other in found)
        found.append(f"{slug}-{repeated}" if repeated else slug)
    return found


def test_links_lead_somewhere():
    links = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
            file, _, anchor = target.partition("#")
            aim = (page.parent / file).resolve() if file else page
            assert aim.is_file(), f"{title(page)} links to {target}"
            assert not anchor or anchor in slugs(aim), f"{title(page)} links to {target}"
            links.append(target)
    assert len(links) > 100


def exists(name):
    """Whether a dotted name is a module, or an attribute or a field in one."""
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
    return {(title(page), name) for page, code in quoted for name in re.findall(rf"\b{package}(?:\.\w+)+", code)}


def test_names_in_the_text_exist():
    assert exists("jaxdp.models.Pretrained.constants") and exists("jaxdp.audit.multi_run")
    assert not exists("jaxdp.audit.no") and not exists("jaxdp.models.Pretrained.no") and not exists("jaxdp.no")
    written = [page for page in PAGES if page.parent.name != "reference"]
    names = mentioned("jaxdp", written)
    assert len(names) > 60
    assert not [(page, name) for page, name in sorted(names) if not exists(name)]
    programs = mentioned("launch", written)
    assert len(programs) > 5
    assert not [(page, name) for page, name in sorted(programs) if importlib.util.find_spec(name) is None]


def test_names_of_jax_privacy_in_the_migration_table_exist():
    page = DOCS / "migration.md"
    [version] = re.findall(r"jax_privacy (\d[\d.]*\d)", page.read_text())
    if jax_privacy.__version__ != version:
        pytest.skip(f"the table is about jax_privacy {version}, {jax_privacy.__version__} is installed")
    names = mentioned("jax_privacy", [page])
    assert len(names) > 10
    # Its Keras interface needs Keras.
    assert not [name for _, name in sorted(names) if "keras" not in name and not exists(name)]


def test_the_reference_is_what_the_docstrings_say(tmp_path):
    (tmp_path / "stale.md").write_text("a package that was removed")
    runpy.run_path(str(DOCS / "build_reference.py"))["build"](tmp_path)
    built = {page.name: page.read_text() for page in tmp_path.iterdir()}
    committed = {page.name: page.read_text() for page in (DOCS / "reference").iterdir()}
    different = sorted(name for name in built | committed if built.get(name) != committed.get(name))
    assert not different, f"{different} are not what the docstrings say; run: python docs/build_reference.py"
