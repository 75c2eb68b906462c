"""A released folder: it serves what was released, tells nothing of its makers, and shows a changed
file."""

import getpass
import hashlib
import json
import pathlib
import re
import shutil
import socket
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.models import ModelCard, check_released, load_released, save_params, write_release
from jaxdp.privacy import GaussianDpEvent, Ledger
from jaxdp.report.books import Books, accounts_of
from launch.report import verify
from tests.report.test_runs import workdir

NAMES = {
    "README.md",
    "SHA256SUMS",
    "card.json",
    "params.safetensors",
    "predict.stablehlo",
    "probe.npz",
    "report.html",
}
CARD = ModelCard(
    name="Ripeness", architecture="one layer", inputs="raw weights in g", classes=("ripe", "raw")
)
PARAMS = {"b": jnp.array([0.5, -0.5]), "layer": {"w": jnp.arange(6.0).reshape(3, 2) - 2}}
PROBE = np.linspace(0, 900, 6, dtype=np.float32).reshape(2, 3)


def predict(params, inputs):
    scores = inputs / 1000 @ params["layer"]["w"]  # the scaling is the model's
    return jax.nn.softmax(scores + params["b"][None])


def by_numpy(inputs):
    logits = inputs.astype(np.float64) / 1000 @ (np.arange(6.0).reshape(3, 2) - 2) + [0.5, -0.5]
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("released")
    run, _ = workdir(root)
    metrics = {"test accuracy": (0.96, 114)}
    options = {"card": CARD, "probe": PROBE, "workdir": run, "metrics": metrics}
    return write_release(root / "release", predict, PARAMS, **options)


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def seal(folder):
    """Writes the checksums again, as who changes a file on purpose would."""
    lines = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in sorted(NAMES - {"SHA256SUMS"})
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


def test_it_serves_any_number_of_raw_inputs_with_one_program(folder):
    model = load_released(folder)
    rng = np.random.default_rng(1)
    for count in (0, 1, 32, 75):
        inputs = rng.uniform(0, 1000, (count, 3)).astype(np.float32)
        np.testing.assert_allclose(model(inputs), by_numpy(inputs), atol=1e-6)
    assert model.labels(np.array([[0, 900, 900], [0, 0, 0]], np.float32)) == ["raw", "ripe"]
    assert check_released(folder) == 0.0


def test_it_holds_these_files_and_checks_them_with_a_tool_of_every_system(folder):
    assert {path.name for path in folder.iterdir()} == NAMES
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    card = json.loads((folder / "card.json").read_text())
    [guarantee] = card["guarantees"]
    assert guarantee["unit"] == "patient" and "adding or removing one patient" in str(guarantee)
    assert card["measured"] == {"test accuracy": "96.0 % (90.7 to 98.3), 114 cases"}
    assert guarantee["sentence"] in (folder / "README.md").read_text()


def private_words(folder):
    """Returns what tells of a machine, a user or a time in the files of a folder."""
    names = {socket.gethostname(), getpass.getuser(), str(folder.parent)}
    words = "|".join(map(re.escape, names))
    pattern = re.compile(rf"(?<![:\w])({words})\b|20\d\d-\d\d-\d\d|\bseconds\b|fingerprint")
    texts = {path.name: path.read_text("latin-1") for path in folder.iterdir()}
    return {name: pattern.findall(text) for name, text in texts.items() if pattern.search(text)}


def test_it_tells_no_machine_no_user_and_no_time(folder, copied):
    assert private_words(folder) == {}
    (copied / "README.md").write_text(f"trained by {getpass.getuser()} on 2026-01-31")
    assert private_words(copied).keys() == {"README.md"}


@pytest.fixture
def users_locations():
    """The locations that JAX notes where nobody chose others, as the tests do."""
    tests = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", tests)


def test_its_program_tells_no_path_of_a_source_file(users_locations, tmp_path):
    """JAX writes the paths of source files into what it exports: names of a user, of projects."""
    here = pathlib.Path(__file__)
    released = write_release(
        tmp_path / "release", predict, PARAMS, card=CARD, probe=PROBE, workdir=None
    )
    program = (released / "predict.stablehlo").read_text("latin-1")
    assert here.name not in program and str(here.parent) not in program
    assert jax.config.jax_traceback_in_locations_limit == 10
    exported = jax.export.export(jax.jit(predict))(PARAMS, PROBE)
    assert here.name in bytes(exported.serialize()).decode("latin-1")  # what it would tell


def test_a_model_of_public_data_has_a_report_without_accounts(folder, tmp_path):
    options = {"card": CARD, "probe": PROBE, "metrics": {"test accuracy": (0.96, 114)}}
    public = write_release(tmp_path / "release", predict, PARAMS, workdir=None, **options)
    assert "No data set was charged" in (public / "README.md").read_text()
    page = public / "report.html"
    assert verify(page, folder.parent / "run").is_true
    page.write_text(page.read_text().replace("96.0 %", "98.0 %"))
    assert not verify(page, folder.parent / "run").is_true


def test_its_report_is_verified_by_the_workdir(folder, copied):
    run = folder.parent / "run"
    assert verify(folder / "report.html", run).is_true
    page = copied / "report.html"
    page.write_text(page.read_text().replace("96.0 %", "98.0 %"))
    answer = verify(page, run)
    assert not answer.is_true and "98.0" in answer.text
    with pytest.raises(ValueError, match="Give the workdir too"):
        verify(page)


def test_a_true_report_that_leaves_out_an_account_says_so(folder, tmp_path):
    """The card names the accounts of the page, and its writer may leave some out."""
    root = shutil.copytree(folder.parent, tmp_path / "here")
    assert "leaves out" not in verify(root / "release" / "report.html", root / "run").text
    options = {"card": CARD, "probe": PROBE}
    public = write_release(tmp_path / "public", predict, PARAMS, workdir=None, **options)
    answer = verify(public / "report.html", root / "run")
    assert answer.is_true and "spends of this run in" in answer.text
    assert answer.text.endswith("on patients.")
    ledger = root / "ledger.sqlite"
    with Ledger(ledger, run="another") as opened:
        opened.register("others", unit="patient", adjacency="add_remove", delta=1e-5)
        opened.spend("others", GaussianDpEvent(0.1))
    # Another run paid for these, so they are no matter of this release.
    assert "leaves out" not in verify(root / "release" / "report.html", root / "run").text
    some = Books(accounts_of({"": ledger}, ["patients"]))
    hiding = write_release(tmp_path / "some", predict, PARAMS, workdir=some, **options)
    answer = verify(hiding / "report.html", ledger=ledger)
    assert answer.is_true and answer.text.endswith("on others.")
    honest = write_release(tmp_path / "all", predict, PARAMS, workdir=ledger, **options)
    assert "leaves out" not in verify(honest / "report.html", ledger=ledger).text


@pytest.mark.parametrize("name", sorted(NAMES - {"SHA256SUMS"}))
def test_a_changed_or_missing_file_is_named(copied, name):
    content = bytearray((copied / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is not the file that SHA256SUMS"):
        load_released(copied)
    (copied / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(name)} is missing"):
        load_released(copied)


def test_other_parameters_under_new_checksums_answer_otherwise(copied):
    save_params(copied / "params.safetensors", jax.tree.map(lambda x: 1.1 * x, PARAMS))
    seal(copied)
    with pytest.raises(ValueError, match="answers its probe with a difference of"):
        check_released(copied)


def test_inputs_that_do_not_fit_are_refused(folder):
    model = load_released(folder)
    with pytest.raises(ValueError, match=r"inputs must have shape \[n, 3\], got \[2, 4\]"):
        model(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="inputs must be float32, got float64"):
        model(np.zeros((2, 3)))


def test_what_cannot_be_released_writes_nothing(tmp_path):
    run, _ = workdir(tmp_path)
    place = tmp_path / "release"
    given = {"card": CARD, "probe": PROBE, "workdir": run}
    with pytest.raises(ValueError, match="probe must hold at least one public input"):
        write_release(place, predict, PARAMS, **given | {"probe": PROBE[:0]})
    one = ModelCard(name="a", architecture="b", inputs="c", classes=("x",))
    with pytest.raises(ValueError, match="names 1 classes, and predict returns"):
        write_release(place, predict, PARAMS, **given | {"card": one})
    broken = PARAMS | {"b": jnp.array([jnp.nan, 0])}
    with pytest.raises(ValueError, match="NaN or infinite outputs"):
        write_release(place, predict, broken, **given)
    assert not place.exists()
    place.mkdir()
    (place / "old.txt").write_text("")
    with pytest.raises(FileExistsError, match="Give a new or empty folder"):
        write_release(place, predict, PARAMS, **given)


@pytest.mark.parametrize(
    "of",
    [
        lambda x: x.astype(jnp.bfloat16),
        lambda x: x > 0,
        lambda x: (x > 0).astype(jnp.uint8),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_probes_of_every_dtype_are_answered_again(tmp_path, of, dtype):
    card = ModelCard(name="Sign", architecture="none", inputs="numbers")
    options = {"card": card, "probe": np.array([[-1.5], [2.5]], dtype), "workdir": None}
    write_release(tmp_path / "release", lambda params, x: of(x), PARAMS, **options)
    assert check_released(tmp_path / "release") == 0
