"""The files around the code: workflows, make targets, the citation, the hooks. What they name
exists."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import jaxdp

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, flags=re.MULTILINE))


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def unknown(command):
    """Returns what a shell command names and the project does not have: targets, groups, modules,
    files."""
    missing = {
        f"make {name}" for name in re.findall(r"\bmake ([a-z]\w*)", command) if name not in TARGETS
    }
    groups = re.findall(r"--group (\w+)", command)
    missing |= {f"--group {name}" for name in groups if name not in PYPROJECT["dependency-groups"]}
    modules = re.findall(r"-m ((?:jaxdp|launch|tests|benchmarks)\.[\w.]+\w)", command)
    missing |= {f"-m {name}" for name in modules if importlib.util.find_spec(name) is None}
    files = re.findall(
        r"(?<![\w/.$-])((?:\.ci|docs|tests|benchmarks|configs|launch)/[\w/.]+\w)(?![\w/*])", command
    )
    return missing | {name for name in files if not (ROOT / name).exists()}


def test_the_check_of_names_can_fail():
    bad = "make nonsense && pip install --group no -m tests.no\n.ci/no && cat docs/no.md"
    assert unknown(bad) == {"make nonsense", "--group no", "-m tests.no", ".ci/no", "docs/no.md"}
    assert (
        unknown("make test WORKERS=4; .ci/run; pip install --group test; python -m tests.parity")
        == set()
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists_and_may_only_read(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["name"] == path.stem and workflow[True]  # YAML reads the key `on` as a boolean
    assert workflow["permissions"] == {"contents": "read"}
    assert all(0 < job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())
    assert {key for step in steps(workflow) for key in ("run", "uses") if key in step} == {
        "run",
        "uses",
    }
    for step in steps(workflow):
        assert unknown(step.get("run", "")) == set()
        assert re.fullmatch(
            r"actions/(checkout|setup-python)@v\d+", step.get("uses", "actions/checkout@v1")
        )


def test_the_workflows_cover_the_oldest_and_newest_python_that_the_package_names():
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    pattern = r"Programming Language :: Python :: (3\.\d+)"
    named = [
        match[1]
        for name in PYPROJECT["project"]["classifiers"]
        if (match := re.fullmatch(pattern, name))
    ]
    assert PYPROJECT["project"]["requires-python"] == f">={named[0]}"
    assert set(re.findall(r'python: "([\d.]+)"', text)) == {named[0], named[-1]}
    every = {"tests", "dependencies", "docs", "wheel", "parity", "accessibility", "compilers"}
    assert {path.stem for path in WORKFLOWS} == every


def test_the_makefile_and_the_pages_name_what_exists():
    assert {
        "check",
        "test",
        "docs",
        "parity",
        "accessibility",
        "compilers",
        "lint",
        "format",
        "bench",
        "faults",
    } <= TARGETS
    recipes = "".join(line for line in MAKEFILE.splitlines(keepends=True) if "VENV=" not in line)
    assert unknown(recipes) == set()
    assert set(re.search(r"^\.PHONY: (.*)", MAKEFILE, flags=re.MULTILINE)[1].split()) == TARGETS
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"):
        text = (ROOT / name).read_text()
        quoted = "\n".join(re.findall("`([^`\n]+)`", text))
        assert {
            missing for missing in unknown(quoted) if not re.search(r"/x(\.py)?$", missing)
        } == set()
        assert not [
            link for link in re.findall(r"\]\(([^):#]+)\)", text) if not (ROOT / link).exists()
        ]


def locked(folder, *flags):
    """Returns whether uv takes the lock file of a folder for that of its pyproject.toml, offline
    and without a cache."""
    command = [sys.executable, "-m", "uv", "lock", "--check", "--offline", "--no-cache"]
    return not subprocess.run([*command, *flags], cwd=folder, capture_output=True).returncode


def test_the_lock_file_is_that_of_the_project(tmp_path):
    """`make lock` renews it. The twin has a dependency that the lock file lacks."""
    assert locked(ROOT)
    for name in ("uv.lock", "pyproject.toml", "jaxdp/version.py", "README.md", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert locked(tmp_path)
    text = (tmp_path / "pyproject.toml").read_text()
    changed = text.replace('"scipy>=1.14"', '"scipy>=1.14", "attrs>=23"')
    (tmp_path / "pyproject.toml").write_text(changed)
    assert not locked(tmp_path)


def test_the_lock_file_names_no_index_but_that_of_pypi():
    hosts = set(re.findall(r"https?://([^/\"]+)", (ROOT / "uv.lock").read_text()))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


def test_the_hooks_run_tools_of_the_lint_group():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    tools = {name.split(">=")[0] for name in PYPROJECT["dependency-groups"]["lint"]}
    local, public = hooks["repos"]
    assert {hook["entry"].split()[0] for hook in local["hooks"]} == tools == {"ruff", "mypy"}
    assert all(hook["language"] == "system" for hook in local["hooks"])
    assert re.fullmatch(r"v\d+\.\d+\.\d+", public["rev"])


def test_the_citation_is_that_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == jaxdp.__version__
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert citation["authors"] == PYPROJECT["project"]["authors"]
    assert len({reference["title"] for reference in citation["references"]}) == 5
    assert not {"doi", "url", "repository-code"} & set(citation)


def test_the_package_says_that_it_is_typed():
    """tests/test_wheel.py looks for the file in the wheel."""
    assert (ROOT / "jaxdp" / "py.typed").exists()
    assert "Typing :: Typed" in PYPROJECT["project"]["classifiers"]


# On PyPI another project is called jaxdp, and its import name is the same.
BY_NAME = re.compile(r"pip install (?:-\w+ )*[\"']?jaxdp(?:\[|[\"'`]|\s|$)", re.MULTILINE)


def test_nobody_is_told_to_install_another_project():
    files = [
        path
        for folder in ("jaxdp", "launch", "configs", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".ipynb", ".jinja")
    ]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert len(files) > 300
    assert not [path.name for path in files if BY_NAME.search(path.read_text())]


@pytest.mark.parametrize(
    "advice", ['pip install "jaxdp[flower]"', "pip install -U jaxdp", "`pip install jaxdp`"]
)
def test_the_check_of_advice_can_fail(advice):
    assert BY_NAME.search(advice)
    assert not BY_NAME.search('pip install ".[flower]", pip install jaxdp_ledger-*.whl')


def faults_of_image(text, ignored):
    """Returns what is wrong with a Dockerfile: sources of COPY that are missing or not sent to the
    builder, an installation that ignores the lock file or follows the code, root, no volume."""
    lines = re.sub(r"\\\n", " ", text)
    commands = re.findall(r"^([A-Z]+) (.+)$", lines, flags=re.MULTILINE)
    stages = re.findall(r"^FROM (?:\S+) AS (\w+)$", text, flags=re.MULTILINE)
    faults = []
    code_was_copied = False
    for command, arguments in commands:
        if command == "FROM":
            code_was_copied = False
        if command == "COPY" and not arguments.startswith("--from="):
            *sources, _ = arguments.split()
            faults += [name for name in sources if not (ROOT / name).exists()]
            faults += [name for name in sources if f"!{name}" not in ignored.splitlines()]
            code_was_copied |= "jaxdp" in sources
        faults += [name for name in re.findall(r"from=(\w+)", arguments) if name not in stages]
        if "uv sync" in arguments:
            faults += [] if "--locked" in arguments else ["not locked"]
            faults += ["dependencies after the code"] if code_was_copied else []
        if "pip install" in arguments and not {"--offline", "--no-deps"} <= {*arguments.split()}:
            faults.append("not locked")
    extras = re.findall(r"--extra (\w+)", text)
    faults += [name for name in extras if name not in PYPROJECT["project"]["optional-dependencies"]]
    groups = re.findall(r"--only-group (\w+)", text)
    faults += [name for name in groups if name not in PYPROJECT["dependency-groups"]]
    users = [arguments for command, arguments in commands if command == "USER"]
    faults += [] if users and users[-1] not in ("root", "0") else ["root"]
    home = re.search(r"JAXDP_HOME=(\S+)", text)
    faults += [] if home and ("VOLUME", home.group(1)) in commands else ["no volume"]
    return faults


IMAGE, IGNORED = ((ROOT / name).read_text() for name in ("Dockerfile", ".dockerignore"))


def test_the_image_is_made_of_the_lock_file():
    """A parser, not a build: no machine of the tests has a Docker daemon."""
    assert faults_of_image(IMAGE, IGNORED) == []


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("COPY launch launch", "COPY launchers launchers", "launchers"),
        ("uv sync --locked --no", "uv sync --no", "not locked"),
        ("--offline --no-deps", "", "not locked"),
        ("COPY pyproject.toml uv.lock ./\nRUN", "COPY jaxdp jaxdp\nRUN", "dependencies after"),
        ("--extra bundled", "--extra bundles", "bundles"),
        ("--only-group build", "--only-group builds", "builds"),
        ("--from=dependencies", "--from=dependency", "dependency"),
        ("USER jaxdp", "USER root", "root"),
        ("VOLUME /ledgers", "VOLUME /work", "no volume"),
    ],
)
def test_the_check_of_the_image_can_fail(before, after, fault):
    assert before in IMAGE
    faults = faults_of_image(IMAGE.replace(before, after), IGNORED)
    assert any(text.startswith(fault) for text in faults)
    assert "uv.lock" in faults_of_image(IMAGE, IGNORED.replace("!uv.lock", ""))
