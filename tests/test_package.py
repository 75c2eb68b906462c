"""The package as a whole: it imports fast and cleanly, its layers point down only, and lint is
clean."""

import ast
import functools
import graphlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxdp

ROOT = Path(__file__).resolve().parent.parent
# What each package of jaxdp may import from the rest of jaxdp, besides jaxdp.version.
BELOW = {
    "files": set(),
    "privacy": {"files"},
    "compilers": {"transforms"},
    "transforms": set(),
    "data": {"files", "privacy", "transforms"},
    "models": {"files", "privacy", "transforms", "data", "report"},
    "report": {"files", "privacy", "transforms"},
    "release": {"files", "privacy", "transforms", "report"},
}
# Every other package is a stage, which imports no other stage, or the audits.
STAGES = {path.parent.name for path in (ROOT / "jaxdp").glob("*/__init__.py")} - {*BELOW, "audit"}
UNDER_A_STAGE = {"files", "privacy", "transforms", "models", "data", "report", "release"}
ALLOWED = {
    **BELOW,
    **dict.fromkeys(STAGES, UNDER_A_STAGE),
    "audit": UNDER_A_STAGE | STAGES,
}
# Above the till nobody draws, derives or hashes a secret by other means.
SECRETS = {
    "hmac",
    "secrets",
    "jaxdp.transforms.noise.new_seed",
    "jaxdp.transforms.noise.stream",
    "jaxdp.transforms.noise.keys",
    "jaxdp.transforms.noise.keys.new_seed",
    "jaxdp.transforms.noise.keys.stream",
}
SOURCES = sorted((ROOT / "jaxdp").rglob("*.py"))
CODE = [
    path
    for folder in ("jaxdp", "launch", "configs", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_modules(path: Path) -> set[str]:
    """Return the absolute names of everything that a file imports anywhere, also inside
    functions."""
    package = list(path.relative_to(ROOT).parent.parts)
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def layer_violations(layer: str, names: set[str]) -> set[str]:
    """Return the imports that a file of package `layer` must not have."""
    bad = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "jaxdp":
            target = parts[1] if len(parts) > 1 else ""
            if target not in {layer, "version", "memory"} | ALLOWED[layer]:
                bad.add(name)
        elif parts[0] in {"launch", "configs", "ml_collections"} or (
            parts[0] == "flax" and layer in {"privacy", "transforms"}
        ):  # nothing in jaxdp knows a study
            bad.add(name)
    return bad


def secrets_elsewhere(path: Path) -> set[str]:
    """Return where a file takes secrets or tokens from, if not from the till."""
    names = imported_modules(path) & SECRETS
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and node.attr in {"new_seed", "stream"}:
            if isinstance(node.value, ast.Name) and node.value.id == "noise":
                names.add(f"noise.{node.attr}")
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "token"
            and ast.unparse(node.value) != "token"
        ):
            names.add("token=")  # handing one on is not making one
    return names


def forbidden_imports(names: set[str]) -> set[str]:
    """Return imports of private JAX, of pickle, and of TensorFlow."""
    packages = {"pickle", "cloudpickle", "dill", "tensorflow"}
    return {
        n for n in names if n.startswith(("jax._src", "jaxlib.")) or n.split(".")[0] in packages
    }


def module_level_imports(tree: ast.Module) -> set[str]:
    """Return what importing the module imports: statements at its top level, outside functions."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def distribution(folder: Path, name: str) -> Path:
    """Returns a folder in which a distribution of this name is installed."""
    (folder / f"{name}-0.0.5.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.5\n"
    (folder / f"{name}-0.0.5.dist-info" / "METADATA").write_text(metadata)
    return folder


@pytest.mark.slow
def test_import_is_quiet_and_fast_and_a_ledger_opens_without_jax(run_in_subprocess, tmp_path):
    """A project of another name beside it gets no warning, which would be an error here.

    The limit on a ledger allows for twice the time of `dp_accounting`, which imports SciPy.
    The test of the base install imports every name without TensorFlow."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert declared["tool"]["hatch"]["version"]["path"] == "jaxdp/version.py"
    code = f"""
import importlib.metadata, sys, time
sys.path.append({str(distribution(tmp_path, "another"))!r})
start, used = time.perf_counter(), time.process_time()
import jaxdp
assert time.perf_counter() - start < 3, time.perf_counter() - start
assert time.process_time() - used < 0.5, time.process_time() - used
with jaxdp.Ledger.in_memory() as ledger:
    ledger.register("data", adjacency="add_remove", unit="example", epsilon=1.0, delta=0.0)
assert time.process_time() < 2, time.process_time()
assert jaxdp.__version__ == importlib.metadata.version("jaxdp-ledger")
for name in ("jax", "tensorflow", "tensorflow_datasets", "torch"):
    assert name not in sys.modules, name
assert set(jaxdp.__all__) <= set(dir(jaxdp))
"""
    result = run_in_subprocess(code)
    assert result.stdout == "" and result.stderr == ""


@pytest.mark.slow
def test_the_other_project_of_this_name_is_noticed(run_in_subprocess, tmp_path):
    """The test above has the twin: a project of another name."""
    code = f"""
import sys, warnings
sys.path.append({str(distribution(tmp_path, "jaxdp"))!r})
import jaxdp
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jaxdp.Ledger, jaxdp.Ledger
(text,) = [str(one.message) for one in caught if "jaxdp-ledger" in str(one.message)]
assert "pip uninstall -y jaxdp jaxdp-ledger" in text
"""
    run_in_subprocess(code)


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = jaxdp.nonsense


def test_launchers_import_each_other_by_relative_names():
    """They have two: launch in a checkout, jaxdp.launch in a wheel."""
    for path in (ROOT / "launch").rglob("*.py"):
        nodes = ast.walk(parsed(path))
        absolute = {
            name
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in _absolute(node)
        }
        assert not {name for name in absolute if name.split(".")[0] in {"launch", "configs"}}, path


def _absolute(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if node.module and not node.level else []


def launch_imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of launch that a file of launch imports at its top level."""
    package = list(path.relative_to(ROOT).parent.parts)
    found = set()
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{module}.{alias.name}" for alias in node.names} & modules.keys()
            found |= names or {module}
    return found


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return the modules of an import circle, or None if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_no_launcher_is_in_an_import_circle():
    modules = {}
    for path in (ROOT / "launch").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    graph = {name: launch_imports(path, modules) for name, path in modules.items()}
    assert len(graph) > 60 and "launch.run_report" in graph["launch.frame.running"]
    assert circle(graph) is None
    assert circle(graph | {"launch.run_report": {"launch.frame"}}) is not None


def test_one_name_means_one_thing():
    defined: dict[str, list[str]] = {
        name: [] for name in ("Source", "Party", "Method", "Task", "private")
    }
    for path in SOURCES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in defined:
                defined[node.name].append(str(path.relative_to(ROOT / "jaxdp")))
    # A method is what METHODS of its stage names; nothing else is called so.
    assert defined == {
        "Source": ["data/protocol.py"],
        "Party": ["recalibration/protocol.py"],
        "Method": ["recalibration/protocol.py", "tta/method.py"],
        "Task": [],
        "private": ["tta/private.py"],
    }


def test_layers_point_down_only():
    violations = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT).parts
        if len(parts) == 2:  # jaxdp/__init__.py and its like stand above the layers
            continue
        violations[path] = layer_violations(parts[1], imported_modules(path))
    assert len(violations) > 80 and not {path: found for path, found in violations.items() if found}


def test_no_private_jax_no_pickle_and_no_eager_tensorflow():
    lazy = {"tensorflow_datasets", "matplotlib"}
    violations = {}
    for path in CODE:
        eager = module_level_imports(parsed(path))
        violations[path] = forbidden_imports(imported_modules(path)) | {
            n for n in eager if n.split(".")[0] in lazy
        }
    assert len(violations) > 150 and not {
        path: found for path, found in violations.items() if found
    }


def test_secrets_and_tokens_come_from_the_till():
    stages = [path for path in SOURCES if path.relative_to(ROOT).parts[1] in STAGES]
    assert len(stages) > 40 and not {
        path: found for path in stages if (found := secrets_elsewhere(path))
    }


def test_the_check_of_secrets_can_fail(tmp_path):
    path = ROOT / "jaxdp" / "finetune" / "loop.py"
    broken = tmp_path / "jaxdp" / "finetune" / "loop.py"
    broken.parent.mkdir(parents=True)
    text = path.read_text() + "\nimport hmac\nfrom jaxdp.transforms.noise import stream\n"
    broken.write_text(text + "noise.new_seed()\naccount.spend(event, token='x')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "ROOT", tmp_path)
        found = secrets_elsewhere(broken)
    assert found == {"hmac", "jaxdp.transforms.noise.stream", "noise.new_seed", "token="}


def test_the_layer_checks_can_fail():
    assert layer_violations("transforms", {"jaxdp.models.mlp", "flax.linen"}) == {
        "jaxdp.models.mlp",
        "flax.linen",
    }
    assert layer_violations("finetune", {"jaxdp.tta", "jaxdp.data", "flax.linen"}) == {"jaxdp.tta"}
    assert layer_violations("data", {"jaxdp.Ledger"}) == {"jaxdp.Ledger"}
    assert layer_violations("audit", {"launch.frame", "configs.tta"}) == {
        "launch.frame",
        "configs.tta",
    }
    assert layer_violations("release", {"jaxdp.finetune.fit", "jaxdp.report"}) == {
        "jaxdp.finetune.fit"
    }
    bad = {"jax._src.core", "jaxlib.xla_client", "pickle", "tensorflow.io"}
    assert forbidden_imports(bad | {"jaxlib", "jax.extend.core", "tensorflow_datasets"}) == bad


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        # NumPy 2.5 annotates otherwise, and Python 3.11 does not have it.
        pytest.param(
            ["mypy"],
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 12), reason="types are for Python 3.11"
            ),
        ),
    ],
    ids=["ruff-check", "ruff-format", "mypy"],
)
def test_lint_is_clean(command):
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


# What the extras launch, report, bundled, images and plots bring, and those of other data.
EXTRAS = {"ml_collections", "jinja2", "tqdm", "sklearn", "PIL", "matplotlib"}
EXTRAS |= {"tensorflow_datasets", "array_record", "imagecorruptions"}
BASE = """
import importlib.abc, importlib.util, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
found = importlib.util.find_spec  # looks at sys.meta_path too
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in EXTRAS else found(name, package)
)
import jax, jax.numpy as jnp, jaxdp, numpy
for name in jaxdp.__all__:
    getattr(jaxdp, name)
assert "tensorflow" not in sys.modules
out = jaxdp.clipped_grad(jnp.vdot, clip_norm=1.0)(jnp.zeros(3), 5 * jnp.eye(3))
assert abs(float(out.grads.sum()) - 3) < 1e-5
list(jaxdp.report.progress_bar(range(3), label="steps", unit="step"))
from launch import command, usage
from jaxdp.data.images import resize
asked = {
    "bundled": lambda: jaxdp.data.bundled("digits"),
    "report": lambda: jaxdp.report.render_page("page.html.jinja"),
    "images": lambda: resize(numpy.zeros((4, 4, 1), numpy.uint8), (2, 2)),
    "launch": usage.define,
}
for extra, ask in asked.items():
    try:
        ask()
    except ImportError as error:
        assert f"[{extra}]" in str(error), (extra, error)
    else:
        raise AssertionError(extra)
"""


def test_the_base_install_is_small():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 13


@pytest.mark.slow
def test_the_base_install_works_and_an_extra_is_named_where_it_is_missing(run_in_subprocess):
    run_in_subprocess(f"EXTRAS = {EXTRAS}\n{BASE}")
