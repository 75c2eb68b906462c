"""The notebook: it runs from top to bottom in a fresh kernel, holds no logic, and leaves the
runtime's jax alone."""

import ast
import json
import pathlib
import re
import subprocess
import types
import zipfile

import jax
import nbformat
import numpy as np
import pytest

from configs import lifecycle_digits
from jaxdp.privacy import Ledger
from launch import colab
from tests.launch import notebook
from tests.launch.notebook import NOTEBOOK, ROOT

pytestmark = pytest.mark.slow


# --- The notebook -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Returns the folder in which the notebook was executed, and its cells with their outputs, by
    id."""
    folder = tmp_path_factory.mktemp("colab")
    made = notebook.executed(folder)
    return folder, {cell.id: cell.get("outputs", []) for cell in made.cells}


def printed(outputs):
    """Returns the text on stdout. The kernel puts progress bars on stderr between its lines, in any
    order."""
    return "".join(
        output.text
        for output in outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


def shown(outputs, kind):
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def test_every_stage_is_run_and_shown_with_its_figures(executed):
    _, cells = executed
    assert "is installed, with jax" in printed(cells["install"])
    done = re.findall(r"^(\w+): done$", printed(cells["life"]), flags=re.MULTILINE)
    audits = [f"audit_{name}" for name in ("finetune", "recalibrate", "adapt", "split", "predict")]
    assert done == [
        "pretrain",
        "finetune",
        "recalibrate",
        "adapt",
        "split",
        "deploy",
        "references",
        "predict",
        "certificates",
        *audits,
    ]
    figures = {"training": 3, "use": 2, "answers": 0, "audits": 0}
    for name, count in figures.items():
        pieces = "".join(shown(cells[name], "text/html"))
        assert pieces.count('class="chart"') == count and ":root" not in pieces, name
    [attacks] = shown(cells["audits"], "text/html")
    assert attacks.count('class="bar"') == 7
    assert len(shown(cells["split-attack"], "image/png")) == 1


def test_everything_is_paid_for_in_one_ledger(executed):
    folder, cells = executed
    with Ledger(folder / "workdir" / "colab" / "ledger.sqlite") as ledger:
        assert 7.9 < ledger.epsilon("client") <= 8 and 1.9 < ledger.epsilon("stream") <= 2
        assert 1.5 < ledger.epsilon("digits/private") <= 2.15
        report = ledger.report_text()
    assert printed(cells["split-private"]).split() == report.replace(str(folder) + "/", "").split()
    assert "stream" in printed(cells["ledger"])


def test_a_piece_of_the_report_that_is_not_there_is_refused(executed):
    with pytest.raises(ValueError, match=r"no 'Poems'\. Stages that are not done: none"):
        colab.show(executed[0] / "workdir" / "colab", "Poems")


def code_cells():
    return [
        cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"
    ]


def test_the_outputs_of_a_run_on_cpu_are_stored_without_names_of_a_machine():
    """They were stored after all cells had run in order. `python -m tests.launch.notebook` stores
    them again."""
    kept = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(kept)
    assert [cell.execution_count for cell in code_cells()] == list(range(1, len(code_cells()) + 1))
    outputs = {cell.id: cell.outputs for cell in code_cells()}
    assert (
        "CpuDevice" in str(outputs["devices"]) and printed(outputs["life"]).count(": done\n") == 14
    )
    assert not [
        output for found in outputs.values() for output in found if output.get("name") == "stderr"
    ]
    assert not re.search("/tmp/|/home/|/root/", NOTEBOOK.read_text())
    identities = [cell.id for cell in kept.cells]
    assert len(set(identities)) == len(identities) and all(
        re.fullmatch("[a-z]+(-[a-z]+)*", i) for i in identities
    )
    assert "://" not in NOTEBOOK.read_text()


def test_an_unchanged_notebook_says_in_its_first_cell_what_to_set(tmp_path, monkeypatch):
    lines = code_cells()[0].source.splitlines()
    python = "\n".join(line for line in lines if not line.startswith("!"))
    assert lines[-1].startswith("!")  # nothing is cloned before the check
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="Set REPOSITORY in this cell to the address"):
        exec(python, {})
    (tmp_path / "jaxdp").mkdir()  # a clone is there
    exec(python, {})


def test_the_notebook_is_for_any_device():
    """Colab would start a runtime of the kind that the metadata asks for."""
    assert "accelerator" not in nbformat.read(NOTEBOOK, as_version=4).metadata


@pytest.mark.parametrize(
    ("platform", "kind", "words"),
    [
        ("tpu", "TPU v5 lite", ("Found 2 x TPU v5 lite", "on one TPU v5e")),
        ("gpu", "NVIDIA L4", ("Found 2 x NVIDIA L4", "on one H100")),
        ("cpu", "cpu", ("Found 2 x cpu", "is under Runtime", "on one TPU v5e")),
    ],
)
def test_the_device_is_named_with_the_estimates_for_it(platform, kind, words, capsys):
    colab.expect([types.SimpleNamespace(platform=platform, device_kind=kind)] * 2)
    text = capsys.readouterr().out
    assert all(word in text for word in (*words, "the compiler's estimate, not a time", "MLP, 256"))
    assert ("Change runtime type" in text) == (platform == "cpu")


def test_estimates_are_times_at_the_clock_of_the_target(tmp_path, monkeypatch):
    monkeypatch.setattr(colab, "ROOT", tmp_path)
    assert colab.estimates("v5e") == []  # a wheel has no report
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    cases = {
        "a": {"plain": {"total": 3e6}, "clipped": {"total": 6e6}},
        "b": {"plain": {"total": 1.0}},
    }
    cases["c"] = {"plain": {"error": "it was not compiled"}, "clipped": {"total": 1.0}}
    (folder / "compiled_v5e.json").write_text(json.dumps({"cases": cases}))
    [row] = colab.estimates("v5e")
    assert row["case"] == "a" and row["ratio"] == 2.0
    # 1.5 GHz
    assert row["plain, ms"] == pytest.approx(2.0) and row["clipped, ms"] == pytest.approx(4.0)


LOGIC = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.For, ast.While, ast.If, ast.IfExp, ast.Try, ast.With, ast.comprehension),
)


@pytest.mark.parametrize("cell", code_cells(), ids=lambda cell: cell.id)
def test_no_logic_lives_in_a_cell(cell):
    lines = [line for line in cell.source.splitlines() if line.strip()]
    assert 1 <= len(lines) <= 8
    python = "\n".join(line for line in lines if not line.startswith(("!", "%")))
    assert not [node for node in ast.walk(ast.parse(python)) if isinstance(node, LOGIC)]


def test_the_smoke_config_differs_in_values_only():
    full, smoke = lifecycle_digits.get_config(), lifecycle_digits.get_config("smoke")
    assert full != smoke and set(full.keys()) == set(smoke.keys())


# --- Installation -------------------------------------------------------------------------------

TPU = {
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "libtpu": "0.0.30",
    "numpy": "2.2.6",
    "ml-dtypes": "0.5.3",
    "unheard-of": "0.12.0",  # not loaded by any test, unlike what jaxdp imports
}
GPU = {
    **{
        "jax": "0.10.2",
        "jax-cuda12-plugin": "0.10.2",
        "jax-cuda12-pjrt": "0.10.2",
        "nvidia-cudnn-cu12": "9.8.0.87",
    },
    **{"jax-privacy": "2.0.0", "jaxtyping": "0.3.11", "orbax-checkpoint": "0.12"},
}


def test_constraints_pin_jax_and_what_belongs_to_it_only():
    pins = colab.constraints(colab.installed()).splitlines()
    assert f"jax=={jax.__version__}" in pins and f"numpy=={np.__version__}" in pins
    assert colab.constraints(TPU).splitlines() == [
        *("jax==0.10.2", "jaxlib==0.10.2", "libtpu==0.0.30", "ml-dtypes==0.5.3", "numpy==2.2.6")
    ]
    assert colab.constraints(GPU).splitlines() == [
        *(
            "jax==0.10.2",
            "jax-cuda12-pjrt==0.10.2",
            "jax-cuda12-plugin==0.10.2",
            "nvidia-cudnn-cu12==9.8.0.87",
        )
    ]


def wheel(folder, name, version, requires=""):
    """Writes an empty package."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        file.writestr(
            f"{info}/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else "")
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


def test_pip_refuses_to_replace_jax_under_the_constraints(tmp_path):
    wheel(tmp_path, "jax", "99.0")
    wanted = wheel(tmp_path, "needs_new_jax", "1.0", requires="jax>=99")
    path = tmp_path / "constraints.txt"
    path.write_text(colab.constraints(colab.installed()))
    *pip, editable, root = colab.command(path)
    assert (editable, root) == ("--editable", f"{ROOT}[{','.join(colab.EXTRAS)}]") and pip[
        pip.index("--constraint") + 1
    ] == str(path)
    command = [*pip, "--no-index", "--find-links", str(tmp_path), "--dry-run", str(wanted)]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode != 0
    assert f"jax=={jax.__version__}" in refused.stdout + refused.stderr
    path.write_text("")  # it is the constraints that keep it
    assert subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "plugin, extra", [("libtpu", "[tpu]"), ("jax-cuda12-plugin", "[cuda12]"), ("flax", "")]
)
def test_a_jax_that_is_too_old_is_named_with_the_remedy(plugin, extra):
    with pytest.raises(
        RuntimeError, match=r"has jax 0\.7\.2, and jaxdp needs jax>=0\.10\."
    ) as error:
        colab.check_jax({"jax": "0.7.2", plugin: "1.0"})
    assert f'%pip install --upgrade "jax{extra}>=0.10"' in str(error.value)
    for fits in ({"jax": "0.10.0"}, {"jax": "0.11.0.dev20260101+abc"}, {}):
        colab.check_jax(fits)


@pytest.fixture
def pip(monkeypatch):
    """Runs `install` on a runtime with some versions. pip exits with a status and leaves other
    versions."""

    def install(before, after, status=0):
        found = [before, after]
        ran = []

        def run(command, **options):
            ran.append(pathlib.Path(command[command.index("--constraint") + 1]).read_text())
            return subprocess.CompletedProcess(command, status, "", "ERROR: ResolutionImpossible")

        monkeypatch.setattr(colab, "installed", lambda: found.pop(0))
        monkeypatch.setattr(colab.subprocess, "run", run)
        colab.install()
        return ran

    return install


def test_install_says_what_it_did(pip, capsys):
    assert pip(TPU, {**TPU, colab.NAME: "0.1.0", "unheard-of": "0.12.9"}) == [
        colab.constraints(TPU)
    ]
    assert capsys.readouterr().out == "Installed jaxdp 0.1.0. jax 0.10.2 is unchanged.\n"
    assert pip({**TPU, colab.NAME: "0.1.0"}, {}) == []
    assert "jaxdp 0.1.0 is installed" in capsys.readouterr().out


def test_install_stops_where_going_on_would_be_wrong(pip):
    with pytest.raises(
        RuntimeError, match="could not install jaxdp beside the jax of this runtime:\nERROR: Resol"
    ):
        pip(TPU, TPU, status=1)
    with pytest.raises(
        RuntimeError, match=r"replaced pytest, which this kernel had loaded.*Restart session"
    ):
        pip({**TPU, "pytest": "1.0"}, {**TPU, "pytest": "2.0", colab.NAME: "0.1.0"})
    with pytest.raises(RuntimeError, match="Nothing was changed"):
        pip({**TPU, "jax": "0.9.0"}, {})
