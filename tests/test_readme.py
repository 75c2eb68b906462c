"""README: its Python runs, its links lead somewhere, and it stays one page."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()


@pytest.mark.slow
def test_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    [block] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(block, names)
    accuracy, epsilon = re.fullmatch(
        r"accuracy (\S+) at epsilon (\S+)\n", capsys.readouterr().out
    ).groups()
    assert float(accuracy) > 0.7 and 0 < float(epsilon) <= 3
    assert int(names["state"].step) == 30
    assert (tmp_path / "run" / "checkpoints" / "30").is_dir()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "DP-SGD" in page and "test accuracy" in page and "The unit is one patient." in page


def test_the_readme_is_one_page_whose_links_exist():
    assert README.count("\n") <= 100
    targets = re.findall(r"\]\(([^)#]+)", README)
    assert len(targets) > 12
    assert not [target for target in targets if not (ROOT / target).is_file()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(
            "DP-SGD",
            "GEP",
            "DPAdapter",
            "Tent",
            "SAR",
            "Acc-T",
            "AGT's certificate",
            "private answers",
        ),
        *("patch retrieval", "Split Adaptation", "audits"),
    ],
)
def test_a_stranger_finds_a_page_in_one_click(name):
    [rows] = re.findall(r"\| you want \| page \|\n(.*?)\n\n", INDEX, flags=re.DOTALL)
    [row] = [row for row in rows.splitlines() if re.search(rf"\b{name}\b", row.split("|")[1])]
    [target, *_] = re.findall(r"\]\(([^)#]+)", row)
    assert (ROOT / "docs" / target).is_file()


def test_pages_name_the_wheel_that_is_built():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pages = [README, *(page.read_text() for page in (ROOT / "docs").rglob("*.md"))]
    named = [name for page in pages for name in re.findall(r"[\w-]+(?=-\*\.whl)", page)]
    assert len(named) >= 2 and set(named) == {project["name"].replace("-", "_")}
