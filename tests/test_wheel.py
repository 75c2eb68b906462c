"""The wheel: who installs it has the launchers and configs, and the commands that the documentation
tells."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import forked
from tests.launch import tiny

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that holds what the wheel installs."""
    root = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(root)]
    process = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    (wheel,) = root.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(root / "site")
    return root / "site"


def test_it_holds_the_library_the_launchers_and_the_configs(installed):
    for folder in ("launch", "configs"):
        files = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py")}
        place = installed / "jaxdp" / folder
        packed = {path.relative_to(place) for path in place.rglob("*.py")}
        assert packed == files and len(files) > 10
    assert (installed / "jaxdp" / "py.typed").exists()
    for table in ("namings.toml", "registry.toml"):
        assert (installed / "jaxdp" / "models" / table).exists()
    for folder in ("jaxdp/report", "launch"):  # the templates and the style of pages
        packed = {
            path.name
            for path in (installed / "jaxdp" / folder.removeprefix("jaxdp/") / "pages").iterdir()
        }
        assert packed == {path.name for path in (ROOT / folder / "pages").iterdir()} and packed
    assert not (installed / "tests").exists() and not (installed / "launch").exists()


def needed(*names):
    """Returns the installed distributions that these need without any extra, by name."""
    found, missing = {}, list(names)
    while missing:
        name = canonicalize_name(missing.pop())
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        required = map(Requirement, found[name].requires or ())
        missing += [
            one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    return found


def megabytes(distributions):
    files = (path.locate() for one in distributions for path in one.files or ())
    return sum(os.stat(path).st_size for path in files if os.path.exists(path)) / 1e6


@pytest.mark.slow
def test_the_base_install_is_small_beside_what_jax_installs():
    """docs/howto/install.md says the number."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    jax, base = needed("jax"), needed(*(Requirement(one).name for one in project["dependencies"]))
    assert 100 < megabytes(one for name, one in base.items() if name not in jax) < 200


EVERYTHING = """
import importlib, pathlib, pkgutil, sys
import jaxdp.launch
for name in jaxdp.__all__:
    getattr(jaxdp, name)
found = [module.name for module in pkgutil.walk_packages(jaxdp.launch.__path__, "jaxdp.launch.")]
# Two clients have a flag of the same name.
for name in [name for name in found if not name.endswith(("__main__", "split_client"))]:
    importlib.import_module(name)
assert len(found) > 30

# Configs import each other as in a checkout, and a command finds them by their names there.
from jaxdp.launch import catalogue
catalogue.importable()
files = catalogue.resolve(["--config=configs/digits_dpsgd.py"])
files += catalogue.resolve(["--config", "pretrain/digits:sam"])[1:]
files = [pathlib.Path(file.removeprefix("--config=").removesuffix(":sam")) for file in files]
assert all(file.is_absolute() and file.exists() for file in files) and files[1].parts[-2:] == ("pretrain", "digits.py")
folder = files[0].parents[1]
found = [path.relative_to(folder).with_suffix("") for path in (folder / "configs").rglob("*.py")]
for path in found:
    importlib.import_module(".".join(path.parts))
assert len(found) > 20
"""  # noqa: E501


# An interpreter imports once what most commands import: the dependencies, and from the wheel the
# command and training. `EVERYTHING` imports the rest.
MODULES = (
    "flax.linen",
    "optax",
    "orbax.checkpoint",
    "ml_collections",
    "dp_accounting",
    "sklearn.datasets",
    "jaxdp.launch.command",
    "jaxdp.finetune",
)
OUTSIDE = """
import os, sys, warnings
import jax, jaxdp
site, folder = sys.argv[1:3]
del sys.argv[1:3]
sys.path[:] = [path for path in sys.path if path != os.getcwd()]
assert jaxdp.__file__.startswith(site) and sys.path[0] == site
assert not sys.modules.keys() & {"launch", "configs"}
os.chdir(folder)
warnings.simplefilter("default")
jax.config.update("jax_platforms", "cpu")
"""


@pytest.fixture(scope="module")
def outside(installed):
    """Returns `outside(folder, code, *arguments)`, which runs code with what the wheel installs,
    outside of the checkout."""
    # The checkout is needed for tests.forked only.
    path = os.pathsep.join(map(str, (installed, ROOT)))
    interpreter = forked.Interpreter(env={"PYTHONPATH": path, "PYTHONSAFEPATH": "1"})

    def run(folder, code, *arguments):
        given = (str(installed), str(folder), *arguments)
        return interpreter.run(OUTSIDE + code, *given, modules=MODULES, env={})

    return run


@pytest.mark.slow
def test_every_launcher_and_config_can_be_imported(outside, tmp_path):
    process = outside(tmp_path, EVERYTHING)
    assert process.returncode == 0, process.stderr


@pytest.fixture(scope="module")
def jaxdp(outside):
    """Returns `jaxdp(folder, *arguments)`, which runs the command of the wheel as if the modules in
    `without` were not installed."""

    def run(folder, *arguments, without=()):
        code = f"sys.modules.update(dict.fromkeys({without!r}))\n"
        return outside(folder, code + "from jaxdp.command import main\nmain()", *arguments)

    return run


@pytest.mark.slow
def test_the_command_finds_launchers_and_configs_by_name(jaxdp, tmp_path):
    helped = jaxdp(tmp_path, "finetune", "--help")
    assert helped.returncode == 0 and "  --config.private.epsilon=4.0\n" in helped.stdout, (
        helped.stderr
    )
    planned = jaxdp(tmp_path, "plan", "--config", "recalibration/digits")
    assert planned.returncode == 0 and "Pure(1) x 3" in planned.stdout, planned.stderr
    assert list(tmp_path.iterdir()) == []
    compiled = ("plan", "--config", "digits_dpsgd", "--target", "v5e")
    planned = jaxdp(tmp_path, *compiled, without=("libtpu",))
    assert planned.returncode == 2 and 'pip install ".[compilers]"' in planned.stderr, (
        planned.stderr
    )
    other = jaxdp(tmp_path, "finetune", "--config=recalibration/digits", "--dry_run")
    assert (
        other.returncode == 2
        and "Run: jaxdp recalibrate --config recalibration/digits" in other.stderr
    )


@pytest.mark.slow
def test_a_copied_config_runs_with_the_command(jaxdp, tmp_path):
    assert jaxdp(tmp_path, "configs", "copy", "digits_dpsgd", "mine.py").returncode == 0
    (tmp_path / "mine.py").write_text(
        (tmp_path / "mine.py").read_text().replace('"epsilon": 4.0', '"epsilon": 3.0')
    )
    fields = [
        f"--config.{name}={value}"
        for name, value in tiny.FINETUNE.items()
        if not isinstance(value, dict)
    ]
    run = ("finetune", "--config", "mine.py", "--workdir", "run", *fields)
    refused = jaxdp(tmp_path, *run, without=("matplotlib",))
    assert refused.returncode == 2 and 'pip install ".[plots]"' in refused.stderr, refused.stderr
    assert not (tmp_path / "run").exists()  # nothing was spent
    done = jaxdp(tmp_path, *run)
    assert done.returncode == 0, done.stderr
    shown = jaxdp(tmp_path, "ledger", "show", "run/ledger.sqlite")
    assert "budget       epsilon 3 at delta" in shown.stdout


@pytest.mark.slow
def test_a_command_of_the_documentation_runs_anywhere(outside, tmp_path):
    """The config imports another one, and its name is looked up in the package."""
    fields = {**tiny.PRETRAIN, "train.steps": 1, "train.checkpoint_every": 1}
    flags = ["--workdir=run", *(f"--config.{name}={value}" for name, value in fields.items())]
    code = "import runpy\nrunpy.run_module('jaxdp.launch.pretrain', "
    code += "run_name='__main__', alter_sys=True)"
    process = outside(tmp_path, code, "--config=configs/pretrain/digits.py:standard", *flags)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "run" / "result.json").exists()
